"""Files are written as a whole or not at all; errors name the file."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sgl_prefix_attn.predict.codec import encode
from sgl_prefix_attn.predict.record import Calibration


def try_folder(path: Path) -> None:
    """Make the folder of a file that is written later and try to write there. Raises OSError where
    that fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=path.parent).close()


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise an OSError inside with `path` in it; those of write() and fsync() name no file."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def save(calibration: Calibration, path: Path) -> None:
    """Write the file as a whole or not at all.

    CalibrationError: it does not add up. OSError that names the path: it cannot be written.
    """
    data = encode(calibration)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Not tempfile's: those are for their owner alone, and a server may be another user.
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
