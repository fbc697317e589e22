import json

import pytest
from click.testing import CliRunner

from recmill.artifacts import InputError
from recmill.cli.planning import plan
from tests.unit.planning.made_profiles import write_profile, zipf_counts


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("command")
    for seed, name in enumerate(("profile", "later")):
        counts = {"items": zipf_counts(5_000, 1.2, 200_000, seed=0)}
        counts["items"][seed * 50 : seed * 100] += 500
        write_profile(folder / name, counts, dims={"items": 16}, pooled=frozenset(), num_samples=10_000)
    (folder / "topology.yaml").write_text("nodes: 2\nranks_per_node: 4\ninter_node_bytes_per_s: 1e7\n")
    return folder


def run(folder, *arguments, profile="profile"):
    command = [str(folder / profile), "--topology", str(folder / "topology.yaml"), "--memory-budget", "80KiB"]
    result = CliRunner().invoke(plan, [*command, *map(str, arguments)])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_json_is_the_plan_and_nothing_else(folder, tmp_path):
    result = run(folder, "--out", tmp_path / "plan", "--json")
    printed = json.loads(result.stdout)
    assert printed["solver"] == "highs"
    assert printed["bound"] <= printed["objective"] <= printed["bound"] * 1.01
    assert json.loads((tmp_path / "plan" / "plan.json").read_text())["tables"] == printed["tables"]


def test_explain_says_why_every_table_is_where_it_is(folder, tmp_path):
    result = run(folder, "--out", tmp_path / "plan", "--explain", "--total-bytes", "any")
    assert "items: 5,000 rows of 16" in result.stdout
    assert "proven bound" in result.stdout


def test_a_plan_from_an_older_one_counts_its_moves(folder, tmp_path):
    run(folder, "--out", tmp_path / "old", "--total-bytes", "any")
    result = run(folder, "--out", tmp_path / "new", "--from", tmp_path / "old", "--total-bytes", "any", profile="later")
    assert "a plan from scratch would" in result.stdout


def test_what_is_wrong_is_said_in_one_sentence(folder, tmp_path):
    with pytest.raises(InputError, match="--total-bytes is 'lots'"):
        run(folder, "--out", tmp_path / "plan", "--total-bytes", "lots")
    with pytest.raises(InputError, match="no such file; expected a topology"):
        run(folder, "--out", tmp_path / "plan", "--topology", tmp_path / "none.yaml")
