"""Names of the words of the control block, and who may write each.

Every word has exactly one writer, so no lock is shared between the two engines: a process that is stopped or killed at
any instruction can never leave the other side waiting for a lock. Writers: S the serving engine core, R the rollout
engine core, V the supervisor (the `vllm serve` process), A the rollout engine's API server.
"""

from __future__ import annotations

from enum import IntEnum, auto


class Word(IntEnum):
    """64-bit signed words. Times are CLOCK_MONOTONIC nanoseconds, `_ns`."""

    # --- compute gate
    GATE_OPEN = 0  # S: 1 while serving is idle: the rollout may step freely
    GRANT = auto()  # S: number of the turn that is granted, 0 when none
    GRANT_CHUNK_TOKENS = auto()  # S: prefill tokens allowed in the granted turn (or in free steps while open)
    GRANT_SINCE_NS = auto()  # S: when the turn was granted
    GRANT_AFTER = auto()  # S: serving step that has the device before the granted turn
    GRANT_AFTER_UNTIL_NS = auto()  # S: by when that step has left it at the latest
    SERVING_WANTS = auto()  # S: counts arrivals; the rollout starts no free step once it moved
    SERVING_ENGAGED = auto()  # S: value of SERVING_WANTS when serving last opened the gate
    SERVING_SENT = auto()  # S: number of the last serving step that went to the worker
    SERVING_SENT_AFTER = auto()  # S: rollout step that has the device before that one, 0 when none
    SERVING_DONE = auto()  # serving worker, or S once it has answered: last serving step that has left the device
    SERVING_DONE_NS = auto()  # with it: when
    SERVING_WAITED_UNTIL_NS = auto()  # serving worker: when the step in flight got the device, 0 where it had no wait
    SERVING_GAVE_UP = auto()  # serving worker: last rollout step that did not return the device in time
    ROLLOUT_ENTERED = auto()  # R: number of the last rollout step that asked for the device
    ROLLOUT_LEFT = auto()  # rollout worker, or R once it has answered: last rollout step that has left the device
    ROLLOUT_AFTER = auto()  # R: serving step that has the device before the step in flight
    ROLLOUT_AFTER_UNTIL_NS = auto()  # R: how long it is waited for
    ROLLOUT_TURN = auto()  # R: number of the last granted turn it used
    ROLLOUT_STEP_SINCE_NS = auto()  # rollout worker: since when the step in flight has the device; R: 0 until then
    ROLLOUT_STEP_PREDICTED_NS = auto()  # R: predicted length of the step in flight
    ROLLOUT_STEP_EXPECTED_NS = auto()  # R: its largest length, the base of serving's bound on its wait
    OFFER_DECODE_NS = auto()  # R: expected cost of the next step with decodes only
    OFFER_TOKEN_NS = auto()  # R: expected cost of one more prefill token
    OFFER_PREFILL_TOKENS = auto()  # R: prompt tokens it could compute now
    OFFER_DECODES = auto()  # R: requests that would decode
    OFFER_MARGIN_PPM = auto()  # R: safety factor of its estimates, in millionths
    # --- memory
    ROLLOUT_WANTED_PAGES = auto()  # R: further pages it could use now
    ROLLOUT_HELD_PAGES = auto()  # R: pages in its table
    ROLLOUT_CAP_PAGES = auto()  # S: pages that the rollout must come down to (reclaim)
    RECLAIM_SEQ = auto()  # S: counts reclaim requests
    RECLAIM_URGENT = auto()  # S: 1 while serving waits for pages: the bound of their return is shorter
    RECLAIM_DONE_SEQ = auto()  # R: last reclaim request that it has met
    BUDGET_PAGES = auto()  # S: rollout budget of the memory policy
    GRANTED_SEQ = auto()  # S: counts page grants, so that the rollout looks for new pages only when there are some
    ROLLOUT_TABLE_VERSION = auto()  # R: counts changes of the rollout slot table
    SERVING_TABLE_VERSION = auto()  # S
    ROLLOUT_TABLE_APPLIED = auto()  # rollout worker: last table version that it has mapped
    SERVING_TABLE_APPLIED = auto()  # serving worker
    SERVING_USED_PAGES = auto()  # S: pages with blocks in use
    SERVING_CACHED_PAGES = auto()  # S: pages with nothing but unreferenced prefix cache, or nothing
    ROLLOUT_TRANSIENT_BYTES = auto()  # R: on a GPU, memory that it needs beyond what it held after its profile run
    # --- life
    ACTIVE_WANTED = auto()  # A: 1 lend, 0 give everything back (activate / deactivate); V sets it before the start
    RL_STEP = auto()  # A: counts POST /step
    ROLLOUT_DEACTIVATED = auto()  # R: 1 once all pages are given back and requests ended
    START_REFUSED = auto()  # V: 1 once the first sidecar has failed to come up: serving does not begin
    GENERATION = auto()  # V: which sidecar process runs, from 1
    GENERATION_DEAD = auto()  # V: last generation of which no process computes any more
    GENERATION_CLEARED = auto()  # S: last generation whose pages were taken back
    KILL_GENERATION = auto()  # S: generation that owes pages for too long and must be killed
    SERVING_HEARTBEAT_NS = auto()  # S
    ROLLOUT_HEARTBEAT_NS = auto()  # R
    ROLLOUT_ALIVE_NS = auto()  # R: when its background thread last ran, also while the engine is idle
    ROLLOUT_API_ALIVE_NS = auto()  # A (the latest of several): when its event loop last ran
    WEIGHT_VERSION = auto()  # R: counts weight updates; salts the prefix cache
    WEIGHTS_LOADED = auto()  # R: 0 while deactivation has freed the weights
    WEIGHTS_JOB = auto()  # R: number of the last load or release of weights that it has begun
    WEIGHTS_JOB_DONE = auto()  # rollout worker: number of the last load or release of weights that it has ended
    WEIGHTS_PULL = auto()  # R: number of the last pull of weights from a relay that it has begun
    WEIGHTS_PULLED = auto()  # rollout worker: number of the last pull from a relay that it has ended
    PARKED_BYTES = auto()  # rollout worker: weights that deactivation moves to host memory; 0: they are loaded again
    FREED_BYTES = auto()  # rollout worker: device memory that the last release of weights has freed
    PARK_NS = auto()  # rollout worker: how long the latest move took, to host memory or back
    LOAD_NS = auto()  # R: how long the latest activation or weight update took
    KV_BLOCK_BYTES = auto()  # R: size of one of its KV blocks
    KV_BLOCK_TOKENS = auto()  # R
    SERVING_READY = auto()  # S: its pools, gate and latency model are in use
    ROLLOUT_READY = auto()  # R
    # --- counters
    GRANTS = auto()  # S
    DENIALS = auto()  # S
    OVERRUNS = auto()  # serving worker: rollout steps that did not return the device in time
    SLACK_US = auto()  # S: slack at the last decision
    HANDOVER_US = auto()  # S: moving average of how long a granted device stood idle before the rollout's step
    RECLAIMS = auto()  # S: reclaim requests met
    RECLAIMED_PAGES = auto()  # S: pages taken back from the rollout
    CUTS = auto()  # S: emergency cuts
    ROLLOUT_PAGES_MAX = auto()  # S
    RECLAIM_ABORTS = auto()  # R: requests ended because their pages went
    STALL_ABORTS = auto()  # R
    DEACTIVATE_ABORTS = auto()  # R
    TOO_LARGE_ABORTS = auto()  # R: requests ended because they alone outgrew the budget
    PREFIX_QUERY_TOKENS = auto()  # R: prompt tokens looked up in the rollout's prefix cache
    PREFIX_HIT_TOKENS = auto()  # R: of these, found
    ROLLOUT_TOKENS = auto()  # R
    ROLLOUT_STEPS = auto()  # R
    ROLLOUT_RUNNING = auto()  # R
    ROLLOUT_WAITING = auto()  # R
    SERVING_STEPS = auto()  # S
    SERVING_BUSY_NS = auto()  # S: time with a serving step on the device
    ROLLOUT_BUSY_NS = auto()  # R
    ROLLOUT_GATE_FAULTS = auto()  # R: errors in hook code
    SERVING_GATE_FAULTS = auto()  # S


class Bell(IntEnum):
    """32-bit futex words. Several may ring a bell; waiters always bound their sleep and look at the words."""

    SERVING_CORE = 0  # turn taken or returned, pages: wakes the serving engine core's main thread
    DEVICE = auto()  # a step has left the device: wakes the worker whose step comes next
    ARBITER = auto()  # pages wanted or given back: wakes the arbiter thread of the serving engine core
    ROLLOUT_CORE = auto()  # turn granted, gate open, reclaim: wakes the rollout engine core
    SERVING_MAPPER = auto()  # serving slot table changed: wakes the serving worker's mapper thread
    ROLLOUT_MAPPER = auto()
    SERVING_MAPPED = auto()  # serving worker has mapped: wakes the serving engine core
    ROLLOUT_MAPPED = auto()
    SUPERVISOR = auto()


class Note(IntEnum):
    """Short texts."""

    WEIGHT_VERSION = 0  # R: name of the weights in use
    REGISTRATION = 1  # A, under a file lock on the control file: the RL job that holds the engine, as JSON
    START_REFUSAL = 2  # S, or its worker: why the serving engine cannot start, and the fix
