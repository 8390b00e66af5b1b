"""Traces as files: what is written is read again, what is wrong is named with its line, what is cut is forgiven."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from inference.events import Purpose
from inference.queue import QueueLimits
from inference.simulation import trace_file
from inference.simulation.trace import Request, Trace
from inference.simulation.trace_file import TraceWriter, read, write
from inference.simulation.trace_lines import header_line, learned_line, lost_line, request_line
from inference.yaml_files import BadInput
from tests.support import wait_until
from tests.unit.inference.simulation.scene import GIB, a_device, a_model, a_trace, ask

FULL = Trace(
    devices=(a_device("n0/g0", node="n0"), a_device("n1/g0", 80, node="n1")),
    models=(
        a_model("a", 4, load_s=None, parallel=4, stay_warm_s=0.0, pin=True),
        a_model("grün/b", 5.5, preload=True, replicas=3, min_residency_s=7.5, host_bytes=GIB),
    ),
    requests=(
        Request(0.0, "a", 10),
        Request(1.25, "grün/b", 1, "7", "3", Purpose.LOAD, 0.125, 9.5, 60.0, 2.0),
        Request(1.25, "a", 50, "7", None, Purpose.PEEK, None, 0.0),
    ),
    limits=QueueLimits(max_waiting=7, max_overtakes=0, min_residency_s=4.5),
)


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_what_is_written_is_read_again(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    write(FULL, path)
    loaded = read(path)
    assert loaded.warnings == ()
    assert loaded.trace == Trace(FULL.devices, FULL.models, FULL.requests, FULL.limits, source=loaded.trace.source)
    assert str(path).endswith(loaded.trace.source.lstrip("~."))


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_lines_added_one_by_one_are_the_same_trace(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    writer = TraceWriter(path)
    writer.add(header_line(FULL))
    for request in reversed(FULL.requests):  # they come when they end; the file's order does not matter
        writer.add(request_line(request))
    writer.close()
    assert sorted(read(path).trace.requests, key=repr) == sorted(FULL.requests, key=repr)
    assert [request.at_s for request in read(path).trace.requests] == [0.0, 1.25, 1.25]


def test_packed_it_is_ordinary_gzip(tmp_path: Path) -> None:
    path = tmp_path / "trace.gz"
    writer = TraceWriter(path)
    writer.add(header_line(FULL))
    writer.add(b"\n")
    writer.close()
    assert gzip.decompress(path.read_bytes()) == header_line(FULL) + b"\n"


def test_what_was_learned_later_counts(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    trace = a_trace([], models=[a_model("a", load_s=None)])
    late = a_model("c", 1, load_s=1.0)
    path.write_bytes(
        header_line(trace) + learned_line(a_model("a", load_s=4.5)) + learned_line(late) + request_line(ask(1.0, "c"))
    )
    assert read(path).trace.models == (a_model("a", load_s=4.5), late)


def test_gaps_are_told(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(header_line(a_trace([])) + b"\n" + lost_line(3) + lost_line(4))
    [warning] = read(path).warnings
    assert "7 requests are missing" in warning


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_a_writer_killed_in_the_middle_loses_a_line_at_most(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    code = (
        "import sys; from pathlib import Path\n"
        "from inference.simulation.trace_file import TraceWriter\n"
        "from inference.simulation.trace_lines import header_line, request_line\n"
        "from tests.unit.inference.simulation.scene import a_trace, ask\n"
        "writer = TraceWriter(Path(sys.argv[1])); writer.add(header_line(a_trace([])))\n"
        "n = 0\n"
        "while True:\n"
        "    n += 1; writer.add(request_line(ask(float(n), 'a')))\n"
        "    print(n, flush=True)\n"
    )
    root = Path(__file__).resolve().parents[4]
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, cwd=root, start_new_session=True
    ) as child:
        assert child.stdout is not None
        wait_until(lambda: path.exists() and path.stat().st_size > 20_000, "lines to be written")
        os.kill(child.pid, signal.SIGKILL)
        told = child.stdout.read().split()
    requests = read(path).trace.requests
    # What it had told of was safe; the last word itself may have been cut.
    assert len(requests) >= int(told[-1]) - 1
    assert [request.at_s for request in requests] == [float(n + 1) for n in range(len(requests))]


@pytest.mark.parametrize("cut", [1, 5, 12])
@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_a_cut_end_is_left_out_and_told(tmp_path: Path, name: str, cut: int) -> None:
    path = tmp_path / name
    writer = TraceWriter(path)
    for line in (header_line(a_trace([])), request_line(ask(1.0, "a")), request_line(ask(2.0, "b"))):
        writer.add(line)
    writer._file.close()  # as the system does to whoever is killed
    path.write_bytes(path.read_bytes()[:-cut])
    loaded = read(path)
    assert [request.at_s for request in loaded.trace.requests][:1] == [1.0]
    if len(loaded.trace.requests) < 2 or name.endswith("gz"):
        assert len(loaded.warnings) == 1


def test_a_new_file_is_never_written_over_an_old_one(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("precious")
    with pytest.raises(FileExistsError):
        TraceWriter(path)
    with pytest.raises(FileExistsError):
        write(FULL, path)
    assert path.read_text() == "precious"


HEADER = header_line(a_trace([])).decode()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("{}\n", "t.jsonl:1: the first line is no header"),
        ('{"at_s": 1}\n', "t.jsonl:1: the first line is no header"),
        ("nonsense\n", "t.jsonl:1: not valid JSON"),
        ('{"trace": 2}\n', "version 2 of the format; this program reads 1"),
        ('{"trace": 1, "devices": [], "models": []}\n', "t.jsonl:1: devices"),
        ('{"trace": 1, "devices": [{"id": "d"}], "models": []}\n', "key 'devices.0.total_bytes' is missing"),
        (HEADER + "[1]\n", "t.jsonl:2: expected keys and values"),
        (HEADER + '{"at_s": 1, "model": "a"}\n', "t.jsonl:2: key 'priority' is missing"),
        (HEADER + '{"at_s": 1, "model": "a", "priority": 10}\n{"at_s": -1, "model": "a", "priority": 1}\n', ":3: at_s"),
        (HEADER + '{"at_s": 1, "model": "a", "priority": 1001}\n', "between 0 and 1000, got 1001"),
        (HEADER + '{"at_s": 1, "model": "a", "priority": 1, "servce_s": 1}\n', "nearest is 'service_s'"),
        (HEADER + '{"at_s": 1, "model": "aa", "priority": 1}\n', "unknown model 'aa'; nearest is 'a'"),
        (HEADER + '{"lost": "x"}\n', "t.jsonl:2: lost"),
        (HEADER.replace('"max_overtakes"', '"max_overtake"'), "unknown key 'max_overtake'; nearest is 'max_overtakes'"),
        (HEADER.replace('"aging_s":60.0', '"aging_s":0'), "queue.aging_s is 0"),
        (HEADER.replace('"aging_s":60.0', '"aging_s":1e-320'), "must be at least 0.001"),
        (HEADER.replace('"max_waiting":512', '"max_waiting":Infinity'), "t.jsonl:1: queue.max_waiting: expected a fin"),
        (HEADER.replace('"max_waiting":512', '"max_waiting":NaN'), "t.jsonl:1: queue.max_waiting: expected a finite"),
        (HEADER.replace('"max_waiting":512', '"max_waiting":"5"'), "queue.max_waiting: expected a number, got '5'"),
        (HEADER.replace('"max_wait_s":300.0', '"max_wait_s":1e300'), "queue.max_wait_s: must be at most 1000000000"),
        (HEADER.replace('"load_s":10.0', '"load_s":1e10', 1), "models.0.load_s: must be at most 1000000000, got 1e+10"),
        (HEADER.replace(f":{8 * GIB}", ":" + "9" * 400, 1), "claim_bytes: must be more than 0 and at most 11529215"),
        (HEADER.replace(f":{10 * GIB}", ":" + "9" * 400), "total_bytes: must be between 0 and 1152921504606846976"),
        (HEADER.replace('"id":"a"', '"id":"a","parallel":10000001'), "parallel: must be between 1 and 10000000"),
        (HEADER.replace('"id":"b"', '"id":"a"'), "t.jsonl:1: two models are called 'a'"),
        (HEADER.replace("[{", '[{"id":"d0","total_bytes":1},{', 1), "t.jsonl:1: two devices are called 'd0'"),
        (
            HEADER + '{"at_s": 1e17, "model": "a", "priority": 1}\n',
            ":2: at_s: must be at most 1000000000, got 1e+17",
        ),
        (HEADER + '{"at_s": ' + "9" * 400 + ', "model": "a", "priority": 1}\n', "t.jsonl:2: at_s: "),
        (HEADER + '{"at_s": "1", "model": "a", "priority": 1}\n', "t.jsonl:2: at_s: expected a number, got '1'"),
        (HEADER + '{"at_s": true, "model": "a", "priority": 1}\n', "t.jsonl:2: at_s: expected a number, got true"),
        (
            HEADER + '{"at_s": 1, "model": "a", "priority": 1, "service_s": 1e10}\n',
            "service_s: must be at most 1000000000",
        ),
        (HEADER + '{"at_s": 1, "model": "a", "priority": 1, "left_s": "5"}\n', "left_s: expected a number, got '5'"),
        (HEADER + " " * (1 << 20) + "\n", "t.jsonl:2: is longer than 1 MiB"),
        (HEADER + "[" * 60_000 + "\n", "t.jsonl:2: brackets stand too deep in each other"),
        (HEADER + '{"learned":' * 20_000, "t.jsonl:2: brackets stand too deep in each other"),
        (HEADER + '{"at_s": ' + "9" * 5_000 + "}\n", "t.jsonl:2: not valid JSON"),
        (HEADER + '{"at_s": 1, "model"\n' + '{"at_s": 1, "model": "a", "priority": 1}\n', "t.jsonl:2: not valid JSON"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    with pytest.raises(BadInput) as caught:
        read(path)
    assert said in str(caught.value)


def test_a_line_is_not_read_beyond_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.jsonl.gz"
    spaces = gzip.compress(b" " * (8 << 20))
    path.write_bytes(gzip.compress(HEADER.encode()) + spaces)
    with pytest.raises(BadInput, match=r"gz:2: is longer than 1 MiB"):
        read(path)
    monkeypatch.setattr(trace_file, "MOST_HEADER_BYTES", 2 << 20)
    path.write_bytes(spaces)
    with pytest.raises(BadInput, match=r"gz:1: is longer than 2 MiB"):
        read(path)


def test_the_header_of_a_fleet_is_long(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    header = header_line(a_trace([], models=[a_model(f"model-{number}") for number in range(20_000)]))
    assert len(header) > 1 << 20
    path.write_bytes(header + request_line(ask(1.0, "model-7")))
    assert len(read(path).trace.models) == 20_000


def test_numbers_may_be_whole(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(HEADER + '{"at_s": 1, "model": "a", "priority": 1, "service_s": 2, "left_s": null}\n')
    [request] = read(path).trace.requests
    assert (request.at_s, request.service_s, request.left_s) == (1.0, 2.0, None)


def test_what_is_no_gzip_is_told(tmp_path: Path) -> None:
    path = tmp_path / "t.gz"
    path.write_bytes(header_line(FULL))
    with pytest.raises(BadInput, match="cannot be read"):
        read(path)
    with pytest.raises(BadInput, match="cannot be read: No such file"):
        read(tmp_path / "none.jsonl")


def test_lines_are_short(tmp_path: Path) -> None:
    assert json.loads(request_line(ask(1.0, "a", service_s=None))) == {"at_s": 1.0, "model": "a", "priority": 10}
