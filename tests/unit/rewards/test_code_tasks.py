"""Fifty small problems with a right and a wrong program each, and what else decides a verdict."""

import json
import shutil
import time

import pytest

from rlhpc.config.tables_services import SandboxConfig
from rlhpc.protocol.errors import SandboxError
from rlhpc.protocol.types import Verdict
from rlhpc.rewards import code_tests
from rlhpc.rewards.code_place import (
    check_sandbox,
    described_languages,
    environment_of,
    place,
)
from rlhpc.rewards.pool import RewardPool
from rlhpc.sandbox import values
from rlhpc.sandbox.cpp import COMPILERS
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.starts, pytest.mark.timeout(300)]
LISTS = [[3, 1, 2], [5], [-1, 4, 4, 0], [10, 9, 8, 7, 7]]
NUMBERS = [2, 7, 12, 30]
WORDS = ["level", "Hello World", "a", "banana bread"]
# An expression in x that is right, one that is wrong; over lists of integers, integers, texts.
OF_LISTS = [
    ("sum(x)", "sum(x) + 1"), ("max(x)", "x[0]"), ("min(x)", "max(x)"), ("len(x)", "len(set(x))"),
    ("sorted(x)", "x"), ("x[::-1]", "sorted(x)"), ("x[0]", "x[-1]"), ("x[-1]", "x[0]"), ("sum(v * v for v in x)", "sum(x) ** 2"),
    ("sorted(set(x))", "sorted(x)"), ("sum(v % 2 for v in x)", "sum(x) % 2"), ("max(x) - min(x)", "max(x)"),
    ("[v * 2 for v in x]", "x * 2"), ("x.index(max(x))", "0"), ("x.count(x[-1])", "1"), ("sorted(x)[len(x) // 2]", "x[len(x) // 2]"),
    ("[sum(x[:i + 1]) for i in range(len(x))]", "x"),
]  # fmt: skip
OF_NUMBERS = [
    ("x * 2", "x ** 2"), ("x * x", "x + x"), ("x % 3", "x // 3"), ("x // 3", "x % 3"), ("bin(x)[2:]", "bin(x)"),
    ("hex(x)[2:]", "oct(x)[2:]"), ("sum(range(x + 1))", "sum(range(x))"), ("__import__('math').factorial(x)", "x * (x - 1)"),
    ("all(x % d for d in range(2, x))", "x % 2 == 1"), ("[d for d in range(1, x + 1) if x % d == 0]", "list(range(1, x + 1))"),
    ("sum(map(int, str(x)))", "len(str(x))"), ("str(x)[::-1]", "str(x)"), ("2 ** x", "x ** 2"), ("x ^ 5", "x | 5"),
    ("(x + 1) % 7", "x % 7"), ("__import__('math').isqrt(x)", "x // 2"),
]  # fmt: skip
OF_WORDS = [
    ("x[::-1]", "x"), ("x.upper()", "x.title()"), ("len(x)", "len(x.split())"), ("x == x[::-1]", "True"),
    ("x.split()[-1]", "x.split()[0]"), ("x.count('a')", "x.count('l')"), ("x.swapcase()", "x.lower()"), ("x[0]", "x[-1]"),
    ("sorted(x.lower())", "sorted(x)"), ("x.replace('a', 'o')", "x.replace('a', 'o', 1)"), ("x[:3]", "x[-3:]"),
    ("sum(c in 'aeiou' for c in x.lower())", "len(x) // 2"), ("' '.join(w[::-1] for w in x.split())", "x[::-1]"),
    ("''.join(dict.fromkeys(x))", "''.join(sorted(set(x)))"), ("x.find('l')", "x.rfind('l') + 1"), ("ord(x[0])", "ord(x[-1])"),
    ("x.title()", "x.upper()"),
]  # fmt: skip
PROBLEMS = [
    *((right, wrong, "list(map(int, input().split()))", [" ".join(map(str, given)) for given in LISTS]) for right, wrong in OF_LISTS),
    *((right, wrong, "int(input())", list(map(str, NUMBERS))) for right, wrong in OF_NUMBERS),
    *((right, wrong, "input()", WORDS) for right, wrong in OF_WORDS),
]  # fmt: skip


def fenced(program: str) -> str:
    return f"So:\n```python\n{program}\n```\nThat is all.\n"


@pytest.fixture(autouse=True, scope="module")
def patient():
    """A busy machine is no wrong answer."""
    with pytest.MonkeyPatch.context() as patch:
        for name, text in environment_of(SandboxConfig(cpu_s=30.0, wall_s=PATIENCE_S)).items():
            patch.setenv(name, text)
        place.cache_clear()
        yield
        place()[0].close()
        place.cache_clear()


@pytest.mark.parametrize(("right", "wrong", "reads", "inputs"), PROBLEMS)
def test_the_right_program_is_accepted_and_the_wrong_one_is_not(right, wrong, reads, inputs):
    as_values = {"list(map(int, input().split()))": LISTS, "int(input())": NUMBERS, "input()": WORDS}[reads]
    wanted = [eval(right, {"x": value}) for value in as_values]
    printed = json.dumps({"inputs": [f"{text}\n" for text in inputs], "outputs": [f"{value}\n" for value in wanted]})
    returned = json.dumps(
        {"entry_point": "f", "tests": [{"args": [x], "output": y} for x, y in zip(as_values, wanted, strict=True)]}
    )
    for expression, reward in ((right, 1.0), (wrong, 0.0)):
        assert code_tests.code_stdin(fenced(f"x = {reads}\nprint({expression})"), printed).reward == reward
        assert code_tests.code_functions(fenced(f"def f(x):\n    return {expression}"), returned).reward == reward


ONE = json.dumps([{"input": "3\n", "output": "6\n\n"}])


@pytest.mark.parametrize(
    ("completion", "detail"),
    [
        ("6", "no Python program"),
        ("```cpp\nint main() {}\n```", "no Python program"),
        ("```python\nprint(6)", "no Python program"),
        (fenced("print(6)") + "```\nprint(7)\n```", "no Python program"),
        (fenced("print(6); raise SystemExit(2)"), "exit status 2"),
        (fenced("print(7)"), "another output"),
        (fenced("1 / 0"), "ZeroDivisionError"),
        (fenced("print(6)\nwhile True: print('x' * 10000)"), "too much output"),
        (fenced("print(6)\nimport os; os.kill(os.getpid(), 9)"), "signal 9"),
    ],
)
def test_what_is_wrong_says_why(completion, detail):
    outcome = code_tests.code_stdin(completion, ONE)
    assert (outcome.reward, outcome.is_correct) == (0.0, False)
    assert detail in outcome.detail


def test_blanks_at_the_end_of_lines_do_not_count():
    assert code_tests.code_stdin(fenced("print('6  ')\nprint()"), ONE).is_correct


TRICKS = [
    "class Yes:\n    def __eq__(self, other): return True\ndef f(x): return Yes()",
    "class Yes(int):\n    def __eq__(self, other): return True\ndef f(x): return Yes(3)",
    "import json\njson.dumps = lambda value: '{\"value\": 4}'\ndef f(x): return 5",
    "def f(x): return True",
    "def f(x):\n    import os\n    os._exit(0)",
    "def f(x):\n    a = []\n    a.append(a)\n    return a",
    "import os\nos.write(4, b'garbage\\n' + b'[' * 100000 + b'\\n')\ndef f(x): return 1",
    'import os\nos.write(4, b\'{"raised": ""}\\n\' * 2)\nos._exit(0)',  # in words, no fault at all
]


@pytest.mark.parametrize("program", TRICKS[:2] + TRICKS[3:])
def test_no_trick_makes_a_wrong_value_right(program):
    reference = json.dumps({"entry_point": "f", "tests": [{"args": [1], "output": 1}, {"args": [2], "output": 4}]})
    assert code_tests.code_functions(fenced(program), reference).reward == 0.0


ENDS_BADLY = [
    ("import atexit, os\natexit.register(os._exit, 3)\n", "exit status 3"),
    ("import atexit, os\natexit.register(os.kill, os.getpid(), 9)\n", "signal 9"),
    ("import atexit\natexit.register(print, 'x' * (3 << 20))\n", "too much output"),
    ("import time\nwhile time.process_time() < 0.7: pass\n", "too much time"),  # within the whole second of the kernel
]


@pytest.mark.parametrize(("program", "why"), ENDS_BADLY)
def test_right_values_of_a_program_that_exceeds_a_limit_or_fails_afterwards_are_wrong(program, why):
    reference = {"entry_point": "f", "tests": [{"args": [1], "output": 1}], "time_limit_s": 0.5}
    outcome = code_tests.code_functions(fenced(program + "def f(x): return 1"), json.dumps(reference))
    assert (outcome.reward, outcome.detail) == (0.0, f"after 1 tests: {why}")


SAME_HASH = """import os
members = [str(i * (2 ** 61 - 1)) for i in range(1, 40000)]
line = b'{"value": [%s]}\\n' % (FORM % ', '.join(members)).encode()
while line: line = line[os.write(4, line):]
os._exit(0)"""


@pytest.mark.parametrize("form", ['{"$set": [%s]}', '{"x": {"$frozenset": [%s]}}', '{"$tuple": [{"$set": [%s]}]}'])
def test_a_set_whose_members_all_have_one_hash_does_not_keep_the_worker_busy(form):
    reference = json.dumps({"entry_point": "f", "tests": [{"args": [], "output": [{"$set": [1, 2, 3]}]}]})
    began = time.thread_time()
    assert code_tests.code_functions(fenced(f"FORM = {form!r}\n{SAME_HASH}"), reference).detail.endswith(
        "another value"
    )
    assert time.thread_time() - began < 3.0


LARGE = "1" + "0" * 400  # more than a float can be
BEYOND_FLOATS = [
    f"def f(x): return {LARGE}",
    f"def f(x): return [{LARGE}]",
    f'import os\nos.write(4, b\'{{"value": {{"$float": {LARGE}}}}}\\n\')\nos._exit(0)',
    f'import os\nos.write(4, b\'{{"value": {{"$complex": [{LARGE}, 0]}}}}\\n\')\nos._exit(0)',
]


@pytest.mark.parametrize("program", BEYOND_FLOATS)
@pytest.mark.parametrize("output", [0.5, [0.5]])
def test_a_whole_number_beyond_all_floats_is_another_value_and_no_verifier_error(program, output):
    reference = json.dumps({"entry_point": "f", "tests": [{"args": [1], "output": output}]})
    assert code_tests.code_functions(fenced(program), reference).reward == 0.0


def test_an_output_may_be_as_long_as_the_one_that_is_wanted():
    size = 3 << 19  # one and a half times the limit for short ones
    printed = json.dumps({"inputs": [""], "outputs": ["a" * size + "\n"]})
    returned = json.dumps({"entry_point": "f", "tests": [{"args": [], "output": "a" * size}]})
    for letter, is_right in (("a", True), ("b", False)):
        assert code_tests.code_stdin(fenced(f"print({letter!r} * {size})"), printed).is_correct is is_right
        program = fenced(f"def f(): return {letter!r} * {size}")
        assert code_tests.code_functions(program, returned).is_correct is is_right
    assert "too much output" in code_tests.code_stdin(fenced("while True: print('a' * 9999)"), printed).detail


def test_values_beyond_json_are_compared_by_their_type():
    program = fenced("def f(x): return {(1, 2): {x}, 'n': float('nan'), 'b': b'\\x00', 'i': 10 ** 30}")
    wanted = {
        "$dict": [[{"$tuple": [1, 2]}, {"$set": [5]}], ["n", {"$float": "nan"}], ["b", {"$bytes": "00"}], ["i", 10**30]]
    }
    reference = {"entry_point": "f", "tests": [{"args": [5], "output": wanted}]}
    assert code_tests.code_functions(program, json.dumps(reference)).is_correct
    wanted["$dict"][0][1] = [5]
    assert not code_tests.code_functions(program, json.dumps(reference)).is_correct


GUARDED = """
import dataclasses, sys, unittest
@dataclasses.dataclass
class Point:
    x: "int"
def f(x): return Point(x).x
class TestIt(unittest.TestCase): pass
if __name__ == "__main__":
    unittest.main()
    sys.exit(int(input()))
"""


def test_what_a_program_does_when_it_is_run_is_not_done_where_its_function_is_called():
    reference = json.dumps({"entry_point": "f", "tests": [{"args": [1], "output": 1}]})
    assert code_tests.code_functions(fenced(GUARDED), reference).is_correct
    postponed = "from __future__ import annotations\nimport dataclasses\n@dataclasses.dataclass\nclass P:\n    x: int\n"
    assert code_tests.code_functions(fenced(postponed + "def f(x): return P(x).x"), reference).is_correct
    program = fenced("if __name__ == '__main__':\n    print(2 * int(input()))")
    assert code_tests.code_stdin(program, ONE).is_correct


def test_line_ends_of_windows_are_line_ends():
    program = fenced("x = input()\nassert not x.endswith('\\r')\nprint(x)\nprint(input())").replace("\n", "\r\n")
    reference = json.dumps({"inputs": ["3\r\n4\r\n"], "outputs": ["3\r\n4\r\n"]})
    assert code_tests.code_stdin(program, reference).detail == "1 tests"
    returned = json.dumps({"entry_point": "f", "tests": [{"args": [1], "output": 1}]})
    assert code_tests.code_functions(fenced("def f(x):\n    return x").replace("\n", "\r\n"), returned).is_correct


EQUAL = [
    ("from collections import Counter", "Counter('aab')", {"a": 2, "b": 1}),
    ("from collections import defaultdict", "defaultdict(list, a=[1])", {"a": [1]}),
    ("from collections import OrderedDict", "OrderedDict([('b', 1), ('a', 2)])", {"a": 2, "b": 1}),
    ("from collections import namedtuple", "namedtuple('P', 'x y')(1, 2)", {"$tuple": [1, 2]}),
    ("import enum", "enum.IntEnum('E', 'A B').B", 2),
    ("import enum", "enum.Enum('E', {'A': 'a'}, type=str).A", "a"),
    ("from fractions import Fraction", "[Fraction(6, 2), Fraction(1, 2)]", [3, 0.5]),
    ("from decimal import Decimal", "Decimal('0.1')", 0.1),
    ("", "5e-17", 0.0),
    ("", "[1 / 3, -5e-17, 0.1 + 0.2]", [0.3333333333333333, 0, 0.3]),
    ("", "(0.1 + 0.2) * 1j", {"$complex": [0, 0.3]}),
]
OF_NUMPY = [
    ("np.mean(x)", 1.5), ("np.array(x) * 2", [2, 4]), ("np.int64(7)", 7), ("np.bool_(True)", True), ("np.float32(0.1)", 0.1),
    ("np.array([[1, 2], [3, 4]]).T", [[1, 3], [2, 4]]), ("np.array([0.1], dtype=np.float32)", [0.1]), ("[np.float64(2.0)]", [2]),
    ("{'a': np.array(3)}", {"a": 3}), ("np.str_('a')", "a"), ("np.array([])", []),
]  # fmt: skip
UNEQUAL = [
    ("", "1e-6", 0.0), ("", "1.6e-19", 1.7e-19), ("", "True", 1), ("", "1", True), ("", "{'a': 1}", {"a": 2}), ("", "'1'", 1),
    ("class Yes(int):\n    def __eq__(self, other): return True", "Yes(3)", 1),
    ("class Yes(int):\n    def __int__(self): return 1", "Yes(3)", 1.5),
    ("from collections import deque", "deque([1])", [1]),
]  # fmt: skip


@pytest.mark.parametrize(("prelude", "value", "output"), EQUAL)
def test_a_value_that_equals_a_plain_one_is_that(prelude, value, output):
    reference = json.dumps({"entry_point": "f", "tests": [{"args": [], "output": output}]})
    assert code_tests.code_functions(fenced(f"{prelude}\ndef f(): return {value}"), reference).detail == "1 tests"


@pytest.mark.parametrize(("prelude", "value", "output"), UNEQUAL)
def test_a_value_that_does_not_equal_a_plain_one_is_another(prelude, value, output):
    reference = json.dumps({"entry_point": "f", "tests": [{"args": [], "output": output}]})
    assert code_tests.code_functions(fenced(f"{prelude}\ndef f(): return {value}"), reference).reward == 0.0


def test_values_of_numpy_are_those_of_python():
    numpy = pytest.importorskip("numpy")
    for value, output in OF_NUMPY:
        made = eval(value, {"np": numpy, "x": [1, 2]})
        assert code_tests._Comparison(None).is_same(values.decode(values.encode(made)), output), value


PRINTED = [
    ("0.333333", "0.333333333333", True), ("0.3333", "0.333333333333", False), ("2.5", "2.50", True), ("3", "3.0", True),
    ("3.0", "3", False), ("3.0000001", "3", False), ("x = 0.1000000001, y", "x = 0.1, y", True), ("z = 0.1", "x = 0.1", False),
    ("0.1 0.2", "0.1  0.2", False), ("1000000.4", "1000000.0", True), ("1000002.0", "1000000.0", False), ("1.2.4", "1.2.3", False),
    ("1e-05", "0.00001", True), ("-0.0", "0.0", True), ("nan", "0.5", False), ("0.5 1", "0.5 2", False), ("1e999", "1.0", False),
    ("a1.50", "a1.5", False), ("12e34568", "12e34567", False), ("0.50.", "0.5.", True), ("0.5\n0.25", "0.500\n0.250", True),
]  # fmt: skip


@pytest.mark.parametrize(("printed", "wanted", "is_right"), PRINTED)
def test_a_printed_number_is_close_to_a_decimal_fraction_that_is_wanted(printed, wanted, is_right):
    assert code_tests._is_same(printed.encode(), wanted.encode(), 1e-6) is is_right


def test_a_reference_has_a_tolerance_of_its_own():
    def judged(tolerance):
        printed = json.dumps({"inputs": [""], "outputs": ["0.333333\n"], "tolerance": tolerance})
        returned = json.dumps(
            {"entry_point": "f", "tests": [{"args": [], "output": [0.333333]}], "tolerance": tolerance}
        )
        text = fenced("def f(): return [0.3334]\nprint(0.3334)")
        return code_tests.code_stdin(text, printed).is_correct, code_tests.code_functions(text, returned).is_correct

    assert judged(1e-3) == (True, True)
    assert judged(1e-5) == judged(None) == judged(0) == (False, False)
    exact = json.dumps({"inputs": [""], "outputs": ["2.50"], "tolerance": 0})
    assert not code_tests.code_stdin(fenced("print(2.5)"), exact).is_correct


def test_numbers_that_never_end_are_compared_in_little_time():
    began = time.thread_time()
    long = b"1" * 500_000 + b"a " + b"1." * 200_000 + b" " + b"+1e" * 100_000
    assert not code_tests._is_same(long, b"0.5", 1e-6)
    assert code_tests._is_same(long + b" 2.0", long + b" 2.00", 1e-6)
    assert time.thread_time() - began < 2.0


def test_nulls_with_which_a_table_pads_tests_are_no_arguments():
    program = fenced("def f(x, a, b=None): return x + a if b is None else b")
    padded = {"args": [1], "kwargs": {"a": 1, "b": None, "c": None}, "output": 2}
    reference = {"entry_point": "f", "tests": [padded, {"args": [1, 1], "kwargs": None, "output": 2}]}
    assert code_tests.code_functions(program, json.dumps(reference)).is_correct
    padded["kwargs"]["c"] = 3
    assert "unexpected keyword" in code_tests.code_functions(program, json.dumps(reference)).detail
    with_none = {"entry_point": "f", "tests": [{"args": [1]}, {"args": [2], "output": 3}]}  # a null left out
    assert code_tests.code_functions(fenced("def f(x): return None if x == 1 else 3"), json.dumps(with_none)).is_correct


@pytest.mark.parametrize("pair", [r'["\ud800"], "outputs": ["1"]', r'["1"], "outputs": ["\udfff"]'])
def test_half_a_surrogate_pair_in_a_test_is_told_before_a_run(pair):
    with pytest.raises(ValueError, match=r"test 1 has .*half of a surrogate pair"):
        code_tests.check_code_stdin(f'{{"inputs": {pair}}}')


async def test_in_a_worker_a_sandbox_that_fails_is_a_verifier_error():
    settings = SandboxConfig(python="/no/such/python")
    async with RewardPool(1, PATIENCE_S, environment=environment_of(settings)) as pool:
        judgement = await pool.judge("code_stdin", fenced("print(6)"), ONE)
    assert judgement.verdict is Verdict.VERIFIER_ERROR


async def test_a_worker_runs_programs_by_the_settings_of_its_run():
    settings = SandboxConfig(cpu_s=1.0, wall_s=PATIENCE_S)
    async with RewardPool(1, 2 * PATIENCE_S, environment=environment_of(settings)) as pool:
        assert (await pool.judge("code_stdin", fenced("print(6)"), ONE)).verdict is Verdict.CORRECT
        judgement = await pool.judge("code_stdin", fenced("while True: pass"), ONE)
    assert (judgement.verdict, judgement.detail) == (Verdict.WRONG, "test 1 of 1: too much time")


@pytest.fixture
def both(monkeypatch):
    """Programs in Python and C++."""
    if not any(map(shutil.which, COMPILERS)):
        pytest.skip(f"no compiler of C++ ({', '.join(COMPILERS)})")
    settings = SandboxConfig(languages=("python", "cpp"), cpu_s=30.0, wall_s=PATIENCE_S, compile_s=PATIENCE_S)
    place()[0].close()
    for name, text in environment_of(settings).items():
        monkeypatch.setenv(name, text)
    place.cache_clear()
    yield settings
    place()[0].close()
    place.cache_clear()


DOUBLES = "#include <iostream>\nint main() { int n; std::cin >> n; std::cout << %s << std::endl; }"


def test_a_program_in_cpp_is_judged_as_one_in_python_and_one_that_does_not_compile_says_why(both):
    def judged(program, mark="cpp", **more):
        reference = json.dumps({"inputs": ["3\n", "5\n"], "outputs": ["6", "10"], **more})
        return code_tests.code_stdin(f"```{mark}\n{program}\n```", reference)

    assert judged(DOUBLES % "2 * n").is_correct
    assert judged(DOUBLES % "2 * n", mark="C++", language="cpp", time_limit_s=20.0).is_correct
    assert judged(DOUBLES % "n + 3").detail == "test 2 of 2: another output"
    assert "it does not compile: <stdin>:2:" in judged(DOUBLES % "m").detail
    assert "undefined reference" in judged("int f(); int main() { return f(); }").detail
    assert judged(DOUBLES % "2 * n", language="python").detail == "the last fenced block is no Python program"
    assert judged("print(2 * int(input()))", mark="python").is_correct
    assert "signal 11" in judged("int main() { return *(volatile int *)0; }").detail
    check_sandbox(both, is_needed=True)
    assert described_languages(both).startswith("Python and C++ by /")


def test_no_compiler_is_refused_before_a_run_with_the_remedy(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxError, match=r"no g\+\+ or clang\+\+ on PATH: install .*sandbox\.cpp_compiler"):
        check_sandbox(SandboxConfig(languages=("cpp",), require="none"), is_needed=True)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"time_limit_s": 9}, "time_limit_s=9 is above sandbox.cpu_s=4"),
        ({"memory_limit_bytes": 1 << 40}, "above sandbox.memory_bytes"),
        ({"time_limit_s": "2"}, "time_limit_s='2'; legal: seconds above 0"),
        ({"memory_limit_bytes": 0.5}, "memory_limit_bytes=0.5; legal"),
        ({"language": "cpp"}, r"language='cpp'"),
        ({"language": "rust"}, "language='rust'; legal: 'python', 'cpp'"),
        ({"tolerance": -1}, "tolerance=-1; legal: 0, for none, or a number below 1"),
        ({"tolerance": "1e-6"}, "tolerance='1e-6'; legal"),
    ],
)
def test_limits_of_a_record_are_within_those_of_the_run(more, why):
    of_stdin = {"inputs": [""], "outputs": [""], **more}
    of_functions = {"entry_point": "f", "tests": [{"args": [], "output": 1}], **more}
    checks = ((code_tests.check_code_stdin, of_stdin), (code_tests.check_code_functions, of_functions))
    for check, reference in checks:
        with pytest.raises(ValueError, match=why):
            check(json.dumps(reference), SandboxConfig())


def test_a_record_has_limits_of_its_own():
    program = fenced("x = bytearray(200 << 20)\nprint(6)")
    for limit, is_correct in ((1 << 29, True), (1 << 27, False)):
        reference = {"inputs": ["3"], "outputs": ["6"], "memory_limit_bytes": limit}
        assert code_tests.code_stdin(program, json.dumps(reference)).is_correct is is_correct
    endless = code_tests.code_stdin(
        fenced("while True: pass"), json.dumps({"inputs": [""], "outputs": [""], "time_limit_s": 0.2})
    )
    assert endless.detail == "test 1 of 1: too much time"
