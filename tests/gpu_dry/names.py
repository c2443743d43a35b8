"""Hold our uses of a foreign package against one version of it."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.gpu_dry.library import Library
from tests.gpu_dry.receivers import WORKER, receivers
from tests.gpu_dry.uses import Use, uses_in

ROOT = Path(__file__).parents[2]
PACKAGES = ("vllm", "megatron", "deepspeed")


def our_uses(root: Path = ROOT) -> list[Use]:
    """Of all foreign packages, and what our worker extension expects of vLLM's worker."""
    return [*uses_in(root, PACKAGES, receivers()), *_expected_of_the_worker(root)]


def complaints(library: Library, uses: list[Use]) -> list[str]:
    """One line for each use that this version does not answer: no such name, or another signature."""
    found = []
    for use in uses:
        if use.dotted.partition(".")[0] != library.package:
            continue
        meant = library.find(use.dotted)
        if meant is None:
            found.append(f"{use.place}: no {use.dotted}")
        elif use.is_call and (parameters := library.parameters(meant)) is not None:
            complaint = parameters.complaint(use.num_positional, use.keywords, use.is_open)
            found += [f"{use.place}: {use.dotted} {complaint}"] if complaint else []
    return sorted(set(found))


def _expected_of_the_worker(root: Path) -> list[Use]:
    """Attributes that the extension declares for the worker it is mixed into."""
    name = "rlhpc/generation/vllm_worker.py"
    (extension,) = (
        node
        for node in ast.walk(ast.parse((root / name).read_text()))
        if isinstance(node, ast.ClassDef) and node.name == "VllmWorkerExtension"
    )
    declared = [
        each
        for block in extension.body
        if isinstance(block, ast.If)
        for each in block.body
        if isinstance(each, ast.AnnAssign)
    ]
    return [Use(f"{name}:{each.lineno}", f"{WORKER[0]}.{ast.unparse(each.target)}") for each in declared]
