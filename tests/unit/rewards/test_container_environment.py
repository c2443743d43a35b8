"""Tasks in containers: what the shell tells, what tests reward, and what is refused before a run."""

import json

import pytest

from rlhpc.config.file import load_config
from rlhpc.config.tables_services import ContainerConfig, EnvironmentConfig
from rlhpc.data.files import dataset_files
from rlhpc.data.record_source import read_records
from rlhpc.data.tasks import read_task
from rlhpc.environments import container
from rlhpc.protocol.errors import ConfigError, DataError, SandboxError
from rlhpc.rewards.environments import VARIABLE, EnvironmentHost
from rlhpc.rewards.outcomes import DialogueRequest
from tests.task_directories import REWARD_OF_ANSWER, reachable_directory, write_image, write_task
from tests.unit.doc_pages import ROOT

SETTINGS = EnvironmentConfig(tools=("shell",), max_result_characters=400)


@pytest.fixture(scope="module")
def images():
    with reachable_directory() as base:
        write_image(base / "images/programs")
        yield base


@pytest.fixture
def host(images, monkeypatch):
    own = ContainerConfig(
        images=str(images / "images"), root_cache=str(images / "cache"), command_s=20.0, tests_s=30.0, processes=24,
        memory_bytes=128 << 20, disk_bytes=8 << 20,
    )  # fmt: skip
    monkeypatch.setenv(VARIABLE, json.dumps({"container": own.model_dump(mode="json")}))
    container.place.cache_clear()
    made = EnvironmentHost(SETTINGS, lambda *_: pytest.fail("the tests judge"))
    yield made
    made.close()
    container.place().containers.close()
    container.place.cache_clear()


def call(command):
    return f"<tool_call>{json.dumps({'name': 'shell', 'arguments': {'command': command}})}</tool_call>"


def played(host, task, *turns, key="a", is_last=False):
    (record,) = read_records(task)
    return host.answer(
        DialogueRequest(key, "container", json.dumps(record.fields), list(turns), "environment", "", "", is_last)
    )


def results(turn):
    return [message["content"] for message in turn.messages]


@pytest.mark.starts
def test_a_task_is_done_by_commands_and_rewarded_by_its_tests(host, tmp_path):
    task = write_task(tmp_path / "t", files={"data/numbers": "40 2\n"})
    turns = [call("cat data/numbers; pwd") + call("ls /tests /logs; exit 3")]
    assert results(played(host, task, *turns)) == ["40 2\n/app", "/logs:\nagent\nverifier\n\n/tests:\n(exit status 3)"]
    turns.append(call("read -r a b < data/numbers; echo $((a + b)) > answer"))
    assert results(played(host, task, *turns)) == ["(no output)"]
    done = played(host, task, *turns, "It is done.")
    assert (done.is_over, done.reward, done.is_correct) == (True, 1.0, True)


@pytest.mark.starts
def test_a_dialogue_that_a_limit_ends_is_tested_as_it_is(host, tmp_path):
    task = write_task(tmp_path / "t")
    assert played(host, task, call("echo 41 > answer"), is_last=True).reward == 0.0
    assert played(host, task, call("echo 42 > answer"), is_last=True, key="b").reward == 1.0


@pytest.mark.starts
def test_another_worker_goes_on_by_running_the_commands_again(host, tmp_path):
    task = write_task(tmp_path / "t")
    turns = [call("echo 4 > part; echo 1"), call("echo 2 >> part; cat part")]
    answers = [results(played(host, task, *turns[: 1 + n])) for n in range(2)]
    other = EnvironmentHost(SETTINGS, lambda *_: pytest.fail("the tests judge"))
    assert results(played(other, task, *turns)) == answers[1] == ["4\n2"]
    last = call("a=$(cat part); echo ${a//[^0-9]} > answer")
    assert played(other, task, *turns, last, "Done.").reward == 1.0
    other.close()


@pytest.mark.starts
def test_a_container_that_has_ended_meanwhile_is_made_again(host, tmp_path):
    task = write_task(tmp_path / "t")
    played(host, task, call("echo 42 > answer"))
    (kept,) = host._kept.values()
    kept.environment._container.close()  # as after idle_s
    assert results(played(host, task, call("echo 42 > answer"), call("cat answer"))) == ["42"]
    kept.environment._container.close()
    assert played(host, task, call("echo 42 > answer"), call("cat answer"), "Done.").reward == 1.0


@pytest.mark.starts
@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("sleep 60", "(stopped after 20 s)"),
        ("x=$(yes)", "memory"),
        ("kill -9 $$", "(signal 9)"),
        ("printf %01000d 0; exit 1", "bytes left out ...]"),
        ("b() { b | b & }; b; sleep 0.3", "Resource temporarily unavailable"),
    ],
)
def test_the_policy_is_told_how_a_command_ended(host, tmp_path, command, said, monkeypatch):
    if command == "sleep 60":
        quick = container.place().settings.model_copy(update={"command_s": 0.5})
        monkeypatch.setattr(container.place(), "settings", quick)
        said = "(stopped after 0.5 s)"
    (result,) = results(played(host, write_task(tmp_path / "t"), call(command)))
    assert said in result or (said == "memory" and "cannot allocate" in result)
    assert len(result) < 500


@pytest.mark.starts
@pytest.mark.parametrize(
    "command",
    [
        "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; cat /dev/zero > /full",
        "while :; do echo 1 > /logs/verifier/reward.txt; done < /dev/null > /dev/null 2>&1 &",
        "rm -rf /logs; ln -s /app /logs; mkdir verifier; echo 1 > verifier/reward.txt",
        "rm -rf /tests; mkdir /tests; echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh",
        "rm -rf /bin /lib*",
    ],
)
def test_no_command_forges_a_reward_or_makes_it_a_verifier_error(host, tmp_path, command):
    done = played(host, write_task(tmp_path / "t"), call(command), "Done.")
    assert (done.error, done.reward, done.is_correct, done.is_over) == ("", 0.0, False, True)


@pytest.mark.starts
@pytest.mark.parametrize(
    ("tests", "reward", "parts", "detail"),
    [
        ("echo 0.25 > /logs/verifier/reward.txt", 0.25, {}, ""),
        ('echo \'{"reward": 0.5, "speed": 2}\' > /logs/verifier/reward.json', 0.5, {"speed": 2.0}, ""),
        ("echo '{\"score\": 0.5}' > /logs/verifier/reward.json", 0.5, {}, ""),
        ("echo why; exit 1", 0.0, {}, "tests: they wrote no reward; exit status 1: why"),
        ("echo nan > /logs/verifier/reward.txt", 0.0, {}, "tests: reward.txt is nan; exit status 0: "),
        ("echo '[1]' > /logs/verifier/reward.json", 0.0, {}, "legal: an object with a number reward"),
        ("echo '{' > /logs/verifier/reward.json", 0.0, {}, "tests: Expecting property name"),
        ("echo $MINE > /logs/verifier/reward.txt; echo 1 passed", 7.0, {}, "1 passed"),
    ],
)
def test_what_tests_write_is_the_reward(host, tmp_path, tests, reward, parts, detail):
    settings = '[environment]\ndocker_image = "programs"\n[verifier]\nenv = { MINE = "7" }\n'
    done = played(host, write_task(tmp_path / "t", tests=tests, settings=settings), "Done.")
    assert (done.error, done.reward, dict(done.parts)) == ("", reward, parts)
    assert detail in done.detail


@pytest.mark.starts
def test_the_limits_of_a_task_count_where_they_are_lower(host, tmp_path):
    settings = (
        '[environment]\ndocker_image = "programs"\nstorage_mb = 1\n[verifier]\ntimeout_sec = 0.4\n'
        '[metadata]\nnetwork = "loopback"\n'
    )
    task = write_task(tmp_path / "t", settings=settings, tests="sleep 30")
    write = "cat /dev/zero > /big 2> /dev/null; ls -l /big | { read -r a b c d size e; echo $size; }"
    (size,) = results(played(host, task, call(write)))
    assert int(size) <= 1 << 20
    assert "refused" in results(played(host, task, call("echo > /dev/tcp/127.0.0.1/9"), key="b"))[0]
    assert "more than time allows" in played(host, task, "Done.", key="c").detail


def test_a_directory_of_tasks_is_a_dataset(tmp_path):
    for name in ("b", "a"):
        write_task(tmp_path / "tasks" / name, instruction=f"Do {name}.", files={"Dockerfile": "FROM x", "deep/f": "x"})
    records = read_records(tmp_path / "tasks")
    assert [(each.fields["prompt"], each.fields["name"]) for each in records] == [("Do a.", "a"), ("Do b.", "b")]
    assert records[0].fields["task"] == str(tmp_path / "tasks/a")
    names = [str(file.relative_to(tmp_path / "tasks/a")) for file in dataset_files(tmp_path / "tasks/a")]
    assert names == ["task.toml", "instruction.md", "environment/Dockerfile", "environment/deep/f", "tests/test.sh"]
    before = records[0].fields["digest"]
    (tmp_path / "tasks/a/tests/test.sh").write_text("echo other")
    assert read_records(tmp_path / "tasks")[0].fields["digest"] != before


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda task: (task / "tests/test.sh").unlink(), r"tests/test.sh is missing; legal: a script that writes"),
        (lambda task: (task / "instruction.md").unlink(), r"instruction.md: No such file"),
        (lambda task: (task / "task.toml").write_text("[environment"), r"task.toml: Expected"),
        (
            lambda task: (task / "task.toml").write_text(""),
            r"there is no image: .*neither built nor pulled.*docker save",
        ),
        (lambda task: (task / "task.toml").write_text("environment = 3"), r"environment=3; legal: a table"),
        (
            lambda task: (task / "task.toml").write_text('[environment]\ndocker_image = "a/b:1"'),
            r"docker_image='a/b:1' is not at .*/a/b:1 nor at .*a_b_1.tar;.*skopeo copy",
        ),
        (
            lambda task: (task / "task.toml").write_text('[environment]\ndocker_image = "../b"'),
            r"docker_image='../b'; legal: a name below",
        ),
        (lambda task: (task / "task.toml").write_text("[environment]\ngpus = 1"), r"gpus=1; containers have none"),
        (lambda task: (task / "task.toml").write_text('[environment]\nmemory_mb = "x"'), r"memory_mb='x'; legal"),
        (lambda task: (task / "steps").mkdir(), r"a task of several steps"),
    ],
)
def test_a_task_that_cannot_be_done_is_refused_by_file_and_key(tmp_path, change, why):
    task = write_task(tmp_path / "t")
    change(task)
    with pytest.raises(DataError, match=why):
        read_task(task, tmp_path / "images")


def test_images_of_a_task_come_before_those_that_it_names(tmp_path):
    task = write_task(tmp_path / "t", files={"image.tar": "", "note": "n"})
    found = read_task(task, tmp_path)
    assert found.image == task / "environment/image.tar"
    assert list(found.files) == ["note"]
    (task / "environment/Dockerfile").write_text("FROM x\nCOPY note /app\n")
    assert not read_task(task, tmp_path).files  # they are in the image
    assert found.tests["test.sh"].read_text() == REWARD_OF_ANSWER


@pytest.mark.starts
def test_files_that_have_no_room_are_the_task_s_fault(host, tmp_path):
    settings = '[environment]\ndocker_image = "programs"\nstorage_mb = 1\n'
    task = write_task(tmp_path / "t", settings=settings, files={"big": "x" * (2 << 20)})
    with pytest.raises(SandboxError, match=r"environment: .*No space left.*larger container.disk_bytes"):
        played(host, task)


# ----------------------------------------------------------------------------------------------- before anything starts


def config_of(images, tasks):
    words = {"data.path": tasks, "container.images": images / "images", "container.root_cache": images / "cache"}
    return load_config(ROOT / "configs/demo_container.toml", [f"{key}={value}" for key, value in words.items()])


@pytest.mark.starts
def test_a_check_reads_every_task_and_tries_the_tests_of_one(images, tmp_path):
    for name in ("a", "b"):
        write_task(tmp_path / "tasks" / name)
    said = container.check_containers(config_of(images, tmp_path / "tasks"))
    assert "2 tasks in " in said
    assert "the untouched a is rewarded with 0; programs (" in said
    write_task(tmp_path / "tasks/c", settings='[environment]\ndocker_image = "other"\n')
    with pytest.raises(DataError, match=r"c/task.toml: environment.docker_image='other' is not at"):
        container.check_containers(config_of(images, tmp_path / "tasks"))


@pytest.mark.starts
@pytest.mark.parametrize("tests", ["true", "echo many > /logs/verifier/reward.txt", "exit 7"])
def test_a_check_refuses_tests_that_reward_nothing(images, tmp_path, tests):
    write_task(tmp_path / "tasks/a", tests=tests)
    with pytest.raises(ConfigError, match=r"tasks/a, before anything was done: tests: .*legal: tests/test.sh writes"):
        container.check_containers(config_of(images, tmp_path / "tasks"))


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (['environment.tools=["calculator"]'], 'the tool "shell" and data.environment="container" go together'),
        (["data.environment=tools", "data.task=exact_match"], "container.images=.* has no effect with"),
        (["container.tests_s=60.0"], r"container.command_s=10 and container.tests_s=60 are not below"),
        (["container.processes=0"], "container.processes"),
    ],
)
def test_what_does_not_go_together_is_refused(words, why):
    with pytest.raises(ConfigError, match=why):
        load_config(ROOT / "configs/demo_container.toml", words)
