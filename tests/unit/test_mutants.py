"""Generated mistakes, and which tests could go for them (bench/mutants.py, bench/matrix.py)."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

from bench.matrix import Covered, could_go, in_order
from bench.mutants import LiveFunctions, generate

SOURCE = '''
class Shop:
    """Sells."""

    def price(self, count: int, is_member: bool) -> int:
        """In cents."""
        if count < 1 or not is_member:
            raise ValueError("nothing is sold to whoever is no member")
        return count + 7


def outer(limit: int):
    def inner(count):
        return count < limit

    return inner
'''


def module_of(path: Path) -> ModuleType:
    path.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("shop_of_mutants", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_kind_of_mistake_is_made_with_the_lines_of_its_statement_and_of_a_seed_the_same(tmp_path: Path) -> None:
    path = tmp_path / "shop.py"
    module_of(path)
    mutants = generate(path, tmp_path, per_function=99, seed=0)
    of_price = {(mutant.kind, mutant.lines) for mutant in mutants if mutant.function == "Shop.price"}
    assert of_price == {
        ("negated", (7,)),
        ("compared", (7,)),
        ("andor", (7,)),
        ("notgone", (7,)),
        ("offbyone", (7,)),
        ("deleted", (8,)),
        ("text", (8,)),
        ("none", (9,)),
        ("sign", (9,)),
        ("offbyone", (9,)),
    }
    drawn = generate(path, tmp_path, per_function=3, seed=1)
    assert drawn == generate(path, tmp_path, per_function=3, seed=1)
    assert len([mutant for mutant in drawn if mutant.function == "Shop.price"]) == 3
    assert len({mutant.name for mutant in mutants}) == len(mutants)


def test_a_mistake_is_in_the_functions_that_are_there_and_in_closures_that_they_make(tmp_path: Path) -> None:
    path = tmp_path / "shop.py"
    module = module_of(path)
    mutants = {mutant.shown: mutant for mutant in generate(path, tmp_path, per_function=99, seed=0)}
    shop, below_three = module.Shop(), module.outer(3)
    assert LiveFunctions(tmp_path).plant(mutants["count + 7"], tmp_path)
    assert shop.price(8, True) == 1
    assert LiveFunctions(tmp_path).plant(mutants["count < limit"], tmp_path)
    assert below_three(3)
    assert module.outer(3)(3)


def test_what_goes_leaves_all_that_it_finds_and_covers_to_those_that_stay() -> None:
    found = {"a": {"x"}, "b": {"x"}, "c": {"x", "y"}, "d": set(), "e": set(), "f": set()}
    covers = {test: {("file", 1)} for test in found} | {"d": {("file", 2)}}
    sizes = {"a": 10, "b": 20, "c": 5, "d": 9, "e": 9, "f": 9}
    assert could_go(found, covers, sizes, kept={"f"}) == ["e", "b", "a"]  # c finds y alone, d covers line 2 alone


def test_tests_that_run_little_come_first_and_those_of_a_file_stay_together() -> None:
    tests = [Covered(name, 1.0, {"file": set(range(count))}) for name, count in (("a::x", 9), ("b::y", 5), ("a::z", 1))]
    assert [each.test for each in in_order(tests)] == ["a::z", "a::x", "b::y"]
