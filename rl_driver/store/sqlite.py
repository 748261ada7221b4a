"""Trajectories in an SQLite file with a write-ahead log."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from rl_driver.api.trajectory import State, Trajectory, Turn
from rl_driver.store.base import ConflictError

_FORMAT = 1
_BUSY_MS = 10_000
_SCHEMA = """
CREATE TABLE IF NOT EXISTS trajectories (
    number INTEGER PRIMARY KEY, id TEXT UNIQUE NOT NULL, grp TEXT NOT NULL, task BLOB NOT NULL,
    state TEXT NOT NULL, reward REAL);
CREATE INDEX IF NOT EXISTS by_state ON trajectories (state);
CREATE TABLE IF NOT EXISTS turns (
    trajectory INTEGER NOT NULL REFERENCES trajectories (number), idx INTEGER NOT NULL, data BLOB NOT NULL,
    PRIMARY KEY (trajectory, idx)) WITHOUT ROWID;
"""


class SqliteStore:
    """See `TrajectoryStore`. One connection; use it from one thread.

    A committed turn survives the end of the process (WAL, synchronous=NORMAL); a loss of power may cost the latest,
    which are then simply made again.
    """

    def __init__(self, path: Path) -> None:
        """Open or make the file.

        Raises:
            ConflictError: the file is one of another format.
            sqlite3.DatabaseError: it is no SQLite file.
        """
        self._db = sqlite3.connect(path, isolation_level=None)
        self._db.execute(f"PRAGMA busy_timeout = {_BUSY_MS}")
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version not in (0, _FORMAT):
            raise ConflictError(f"{path} has format {version}, this version reads {_FORMAT}: give another file")
        self._db.executescript(_SCHEMA)
        self._db.execute(f"PRAGMA user_version = {_FORMAT}")
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Turn)

    def begin(self, trajectory_id: str, group: str, task: dict[str, Any]) -> None:
        data = self._encoder.encode(task)
        cursor = self._db.execute(
            "INSERT OR IGNORE INTO trajectories (id, grp, task, state) VALUES (?, ?, ?, 'running')",
            (trajectory_id, group, data),
        )
        if cursor.rowcount == 0:
            row = self._db.execute("SELECT grp, task FROM trajectories WHERE id = ?", (trajectory_id,)).fetchone()
            if (row[0], msgspec.msgpack.decode(row[1])) != (group, msgspec.msgpack.decode(data)):
                raise ConflictError(f"trajectory {trajectory_id!r} was begun with another group or task")

    def add_turn(self, trajectory_id: str, turn: Turn) -> None:
        turn.check()
        data = self._encoder.encode(turn)
        self._db.execute("BEGIN IMMEDIATE")
        try:
            number, state = self._row(trajectory_id)
            (count,) = self._db.execute("SELECT count(*) FROM turns WHERE trajectory = ?", (number,)).fetchone()
            if turn.index < count:
                query = "SELECT data FROM turns WHERE trajectory = ? AND idx = ?"
                (stored,) = self._db.execute(query, (number, turn.index)).fetchone()
                if stored != data:
                    raise ConflictError(f"turn {turn.index} of {trajectory_id!r} is stored with other tokens")
            elif turn.index > count or state != "running":
                raise ConflictError(f"turn {turn.index} of {trajectory_id!r}: it has {count} turns and is {state}")
            else:
                self._db.execute("INSERT INTO turns VALUES (?, ?, ?)", (number, turn.index, data))
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def end(self, trajectory_id: str, state: State, reward: float | None) -> None:
        query = "UPDATE trajectories SET state = ?, reward = ? WHERE id = ? AND state = 'running'"
        if self._db.execute(query, (state, reward, trajectory_id)).rowcount == 0:
            self._row(trajectory_id)
            found = self._db.execute("SELECT state, reward FROM trajectories WHERE id = ?", (trajectory_id,)).fetchone()
            if found != (state, reward):
                raise ConflictError(f"trajectory {trajectory_id!r} ended as {found[0]} with reward {found[1]}")

    def get(self, trajectory_id: str) -> Trajectory:
        number, _ = self._row(trajectory_id)
        return self._load(number)

    def unfinished(self) -> Iterator[Trajectory]:
        rows = self._db.execute("SELECT number FROM trajectories WHERE state = 'running' ORDER BY number").fetchall()
        return (self._load(number) for (number,) in rows)

    def close(self) -> None:
        self._db.close()

    def _row(self, trajectory_id: str) -> tuple[int, str]:
        query = "SELECT number, state FROM trajectories WHERE id = ?"
        row = self._db.execute(query, (trajectory_id,)).fetchone()
        if row is None:
            raise KeyError(trajectory_id)
        return row

    def _load(self, number: int) -> Trajectory:
        query = "SELECT id, grp, task, state, reward FROM trajectories WHERE number = ?"
        name, group, task, state, reward = self._db.execute(query, (number,)).fetchone()
        rows = self._db.execute("SELECT data FROM turns WHERE trajectory = ? ORDER BY idx", (number,))
        turns = tuple(self._decoder.decode(data) for (data,) in rows)
        return Trajectory(name, group, msgspec.msgpack.decode(task), state, reward, turns)
