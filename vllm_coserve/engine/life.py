"""What a co-serving pair leaves in the file system ends with it."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

_SOCKET_NAME_BYTES = 38  # "/" and the UUID that vLLM appends
_SOCKET_PATH_MAX_BYTES = 107
_REMOVE_BOUND_S = 5.0


@contextlib.contextmanager
def socket_folder() -> Iterator[Path | None]:
    """A private folder for the sockets between vLLM's processes; it goes with this process, also by SIGKILL.

    vLLM leaves its socket files in the temporary folder when it is killed. Here a small shell waits for the end of this
    process, which closes its standard input, and removes the folder. None where the path would be too long for sockets.
    """
    folder = Path(tempfile.mkdtemp(prefix="coserve-"))
    if len(str(folder)) + _SOCKET_NAME_BYTES > _SOCKET_PATH_MAX_BYTES:
        folder.rmdir()
        yield None
        return
    command = ["/bin/sh", "-c", 'trap "" INT TERM HUP; cat >/dev/null; rm -rf -- "$0"', str(folder)]
    remover = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield folder
    finally:
        assert remover.stdin is not None
        remover.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            remover.wait(_REMOVE_BOUND_S)
        shutil.rmtree(folder, ignore_errors=True)
