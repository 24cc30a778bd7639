"""Every shipped recipe is one that upstream accepts, once our keys are out, and says nothing twice."""

from __future__ import annotations

import pytest
import yaml

from detgraph.cfg import split_options
from helpers import ROOT

RECIPES = sorted((ROOT / "cfg" / "recipes").iterdir())


def load(path):
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def test_there_are_recipes_and_nothing_else():
    assert RECIPES and {path.suffix for path in RECIPES} == {".yaml"}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_loads_and_holds_only_what_differs(path):
    from ultralytics.cfg import DEFAULT_CFG_DICT, get_cfg

    _, upstreams = split_options(load(path))
    args = get_cfg(DEFAULT_CFG_DICT, upstreams)
    for key, value in upstreams.items():
        assert getattr(args, key) == value
        assert DEFAULT_CFG_DICT[key] != value, f"{key}: {value} is upstream's default already"
    assert not {"model", "data", "project", "name", "device"} & set(upstreams), "a recipe says how, not what or where"


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_explains_itself(path):
    assert path.read_text(encoding="utf-8").startswith("# ")


def test_demo_recipe_keeps_its_promises():
    from detgraph.cfg.demo import SIZE, SPLITS

    recipe = load(ROOT / "cfg" / "recipes" / "demo.yaml")
    assert recipe["imgsz"] == SIZE
    assert SPLITS["train"] % recipe["batch"] == 0, "no tail: every batch can be replayed"
    assert recipe["plots"] is False and recipe["amp"] is False, "fonts and check weights would be fetched"
