"""A page driver whose calls fail as scripted, and tables to bring through it."""

import errno

PAGE, PAGES = 64 << 10, 8


class Driver:
    """Keeps what is mapped. The call with number `fail_at` fails after `done` slots of its run, those in `down` too."""

    page_bytes, num_slots = PAGE, PAGES

    def __init__(self, fail_at=0, done=0, down=False):
        self.fail_at, self.done, self.down = fail_at, done, down
        self.calls, self.slots = 0, [-1] * PAGES

    def map_run(self, slot, page, count):
        self._run(slot, range(page, page + count))

    def unmap_run(self, slot, count):
        self._run(slot, [-1] * count)

    def _run(self, slot, pages):
        self.calls += 1
        fails = self.down or self.calls == self.fail_at
        for i, page in enumerate(list(pages)[: self.done] if fails else pages):
            self.slots[slot + i] = page
        if fails:
            raise OSError(errno.ENOMEM, "scripted")

    @property
    def mapped(self):
        return [p for p in self.slots if p >= 0]


def finished(mapper):
    """Apply until nothing fails; returns the failures."""
    failures = 0
    while True:
        try:
            mapper.apply()
            return failures
        except OSError:
            failures += 1


# Pages and slots come and go in runs, a slot changes its page (7: 5, then 0), a page its slot (4: at 4, out, at 2).
TABLES = (
    [0, 1, 2, 3, 4, -1, 7, 5],
    [0, -1, -1, 3, -1, -1, 7, 5],
    [-1, 1, 4, 3, 2, -1, 7, 0],
    [-1] * 8,
    [6, 7, -1, -1, 0, 1, 2, 3],
)
