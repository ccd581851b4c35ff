"""TensorBoard's event files, written step by step without its thread: a fault is raised here."""

import os
import socket
import struct
import time
from io import BytesIO
from pathlib import Path

from google.protobuf.message import DecodeError
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c
from tensorboard.summary.writer.record_writer import RecordWriter

from rl_train.files import Appended, writing

NAME = "events.out.tfevents."


class Events:
    """Points of a run in a folder, in a file of this process beside those of earlier ones.

    Points beyond the step `start`, left by a killed run, are cut off; at 0, where nothing is done
    yet, all are. A point that is there already is not written again.
    """

    def __init__(self, folder: Path, start: int):
        self.known = set()  # (tag, step) of the steps that a resume may measure again
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            past = sorted(folder.glob(f"{NAME}*"))
            for path in past:
                if start:
                    self._cut(path, start)
                else:
                    path.unlink()
        # TensorBoard reads files in the order of their names.
        newest = max((int(path.name.removeprefix(NAME).split(".")[0]) for path in past), default=0)
        number = max(int(time.time()), newest + 1)
        name = f"{NAME}{number:010d}.{socket.gethostname()}.{os.getpid()}"
        self.file = Appended(folder / name)
        # To a TensorBoard that has read them, START says that later points are void.
        begin = dict(file_version="brain.Event:2"), dict(session_log=SessionLog(status="START"))
        self.file.write(b"".join(_record(step=start + 1, **event) for event in begin))

    def _cut(self, path: Path, start: int):
        """Cut off all from the first point beyond `start`, or from a record that a kill tore."""
        end = 0
        with path.open("rb") as file:
            for event in _events(file):
                if event.HasField("summary"):
                    if event.step > start:
                        break
                    if event.step in (0, start):
                        self.known |= {(value.tag, event.step) for value in event.summary.value}
                end = file.tell()
        os.truncate(path, end)

    def add(self, summaries: list[Summary], step: int):
        """Write the points of torch's `summary` functions (scalar, image, text)."""
        values = [value for summary in summaries for value in summary.value]
        new = [value for value in values if (value.tag, step) not in self.known]
        if new:
            self.file.write(_record(step=step, summary=Summary(value=new)))


def _record(**fields) -> bytes:
    """An event as it stands in a file: length, its checksum, bytes, their checksum."""
    piece = BytesIO()
    RecordWriter(piece).write(Event(wall_time=time.time(), **fields).SerializeToString())
    return piece.getvalue()


def _events(file):
    """The events of an open file up to its end or the first record that is not whole."""
    while len(header := file.read(12)) == 12:
        length, checksum = struct.unpack("<QI", header)
        if checksum != masked_crc32c(header[:8]):
            return
        data = file.read(length + 4)
        if len(data) < length + 4:
            return
        try:
            yield Event.FromString(data[:-4])
        except DecodeError:
            return
