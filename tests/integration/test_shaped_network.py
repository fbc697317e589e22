"""Real processes in network namespaces: what crosses the slow link is counted, and nothing stays behind."""

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
shaped_network = importlib.import_module("shaped_network")

NUM_BYTES = 2_000_000
SCRIPT = f"""
import os, socket, time
from shaped_network import read_counters, write_result

rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
before = read_counters()
start = time.perf_counter()
if rank == 0:
    with socket.create_server((os.environ["MASTER_ADDR"], port)) as server:
        left = {NUM_BYTES}
        connection, _ = server.accept()
        while left:
            left -= len(connection.recv(1 << 16))
        connection.close()
elif rank == 1:
    for _ in range(200):
        try:
            connection = socket.create_connection((os.environ["MASTER_ADDR"], port))
            break
        except OSError:
            time.sleep(0.05)
    connection.sendall(b"x" * {NUM_BYTES})
    connection.recv(1)  # the other side closes when it has everything
after = read_counters()
write_result({{"seconds": time.perf_counter() - start,
              "moved": after and {{name: after[name] - before[name] for name in after}}}})
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "rank.py"
    path.write_text(f"import sys\nsys.path.insert(0, {str(Path(shaped_network.__file__).parent)!r})\n" + SCRIPT)
    return path


def namespaces() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout.splitlines()
    return [line for line in listed if line.startswith(f"recmill-{os.getpid()}-")]


def can_make_namespaces() -> bool:
    name = f"recmill-{os.getpid()}-probe"
    if os.geteuid() or not shutil.which("ip") or not shutil.which("tc"):
        return False
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode == 0
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return made


@pytest.mark.skipif(not can_make_namespaces(), reason="network namespaces need root and iproute2")
def test_the_slow_link_is_as_slow_as_asked_and_counts_what_crosses_it(script):
    found = shaped_network.run_on_nodes(script, nodes=2, ranks_per_node=1, inter_mbit=40)
    assert (found["network"], found["note"]) == ("namespaces", "")
    sender = found["results"][1]
    assert sender["moved"]["node_sent"] == pytest.approx(NUM_BYTES, rel=0.1)
    assert sender["moved"]["sent"] == pytest.approx(NUM_BYTES, rel=0.1)
    assert found["node_bytes"][0]["received"] == pytest.approx(NUM_BYTES, rel=0.1)
    assert found["results"][0]["seconds"] > 0.95 * (NUM_BYTES * 8 / 40e6)  # what an idle link sends at once is little
    assert namespaces() == []


@pytest.mark.skipif(not can_make_namespaces(), reason="network namespaces need root and iproute2")
def test_bytes_inside_a_node_stay_off_the_slow_link(script):
    found = shaped_network.run_on_nodes(script, nodes=1, ranks_per_node=2, inter_mbit=40)
    assert found["results"][1]["moved"]["sent"] == pytest.approx(NUM_BYTES, rel=0.1)
    assert found["results"][1]["moved"]["node_sent"] < 0.1 * NUM_BYTES


def test_without_iproute2_the_ranks_use_loopback_and_the_result_says_so(script, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    found = shaped_network.run_on_nodes(script, nodes=2, ranks_per_node=1, inter_mbit=40)
    assert found["network"] == "loopback"
    assert "the ranks talk over loopback at full speed" in found["note"]
    assert [own["moved"] for own in found["results"]] == [None, None]
    assert found["rank_bytes"] is None


def test_a_rank_that_fails_is_named_with_its_last_words_and_nothing_stays_behind(tmp_path):
    path = tmp_path / "rank.py"
    path.write_text("import os, time\nif os.environ['RANK'] == '1': raise ValueError('no more')\ntime.sleep(60)\n")
    with pytest.raises(RuntimeError, match=r"(?s)rank 1 failed: .*ValueError: no more"):
        shaped_network.run_on_nodes(path, nodes=2, ranks_per_node=1, inter_mbit=None)
    assert not shutil.which("ip") or namespaces() == []
