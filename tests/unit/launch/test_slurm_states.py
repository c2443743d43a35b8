"""Every state and every reason of Slurm's has its place and its sentence, and an unknown one does no harm."""

from __future__ import annotations

import pytest

from launch.slurm.states import REASONS, STATES, EndedBy, JobStage, JobState, is_stuck, reason_in_words, state_of

BASE = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PENDING", "PREEMPTED",
    "RUNNING", "SUSPENDED", "TIMEOUT",
}  # fmt: skip
FLAGS = {
    "COMPLETING", "CONFIGURING", "EXPEDITING", "LAUNCH_FAILED", "POWER_UP_NODE", "RECONFIG_FAIL", "REQUEUED",
    "REQUEUE_FED", "REQUEUE_HOLD", "RESIZING", "RESV_DEL_HOLD", "REVOKED", "SIGNALING", "SPECIAL_EXIT", "STAGE_OUT",
    "STOPPED", "UPDATE_DB",
}  # fmt: skip


def named(condition: str, states: tuple[JobState, ...] = STATES) -> set[str]:
    return {state.name for state in states if condition in (state.life.value, state.ended_by.value)}


def test_the_table_holds_every_state_and_flag_that_slurm_documents_once() -> None:
    assert {state.name for state in STATES} == BASE | FLAGS
    assert len(STATES) == len(BASE) + len(FLAGS)
    codes = [state.code for state in STATES if state.code]
    assert len(codes) == len(set(codes))


def test_who_ended_a_job_is_told_apart() -> None:
    assert named("success") == {"COMPLETED"}
    assert named("Slurm's world") == {"NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "REVOKED"}
    assert named("the user or an administrator") == {"CANCELLED"}
    assert named("the run itself") == {"FAILED", "OUT_OF_MEMORY"}
    assert named("a limit of the site") == {"TIMEOUT", "DEADLINE"}


def test_a_job_has_been_ended_by_somebody_exactly_if_it_is_over() -> None:
    for state in STATES:
        assert state.is_alive == (state.ended_by is EndedBy.NOBODY), state.name
        assert not (state.is_alive and state.is_worth_resuming), state.name
        assert not (state.is_restarted_by_slurm and not state.is_alive), state.name


def test_only_what_the_world_or_the_clock_ended_is_worth_resuming_as_it_is() -> None:
    assert {state.name for state in STATES if state.is_worth_resuming} == {
        "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL",
    }  # fmt: skip


def test_what_is_held_says_how_it_is_let_go() -> None:
    held = [state for state in STATES if state.life is JobStage.HELD]
    assert {state.name for state in held} == {"REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD", "LAUNCH_FAILED"}
    assert all("scontrol release" in state.sentence or "rlhpc stop" in state.sentence for state in held)


def test_what_waits_starts_by_itself_and_what_is_stopped_does_not() -> None:
    assert named("waiting") == {"PENDING", "REQUEUED", "REQUEUE_FED", "EXPEDITING", "RECONFIG_FAIL"}
    assert all(state.is_restarted_by_slurm for state in STATES if state.life is JobStage.WAITING)
    assert state_of("SUSPENDED").is_restarted_by_slurm
    assert not state_of("STOPPED").is_restarted_by_slurm


@pytest.mark.parametrize(
    ("word", "remedy"),
    [
        ("OUT_OF_MEMORY", "memory_gib_per_gpu"),
        ("TIMEOUT", "cluster.warn_s"),
        ("DEADLINE", "--deadline"),
        ("FAILED", "rlhpc logs"),
        ("CANCELLED", "rlhpc resume"),
        ("PREEMPTED", "rlhpc resume"),
    ],
)
def test_a_state_with_a_remedy_names_it(word: str, remedy: str) -> None:
    assert remedy in state_of(word).sentence


@pytest.mark.parametrize(
    ("word", "name"),
    [("CANCELLED by 1000", "CANCELLED"), ("PREEMPTED+", "PREEMPTED"), ("oom", "OUT_OF_MEMORY"), (" R \n", "RUNNING")],
)
def test_a_state_is_read_as_slurm_dresses_it(word: str, name: str) -> None:
    assert state_of(word).name == name


@pytest.mark.parametrize("word", ["HIBERNATING", "", "N/A"])
def test_an_unknown_state_is_alive_and_says_that_it_is_unknown(word: str) -> None:
    state = state_of(word)
    assert state.is_alive
    assert not state.is_known
    assert not state.is_worth_resuming
    assert "unknown to rlhpc" in state.sentence


def test_every_state_in_which_a_job_does_not_go_on_says_what_to_do_or_why() -> None:
    assert len({state.sentence for state in STATES}) == len(STATES)
    for state in STATES:
        assert state.sentence, state.name
        if state.life is JobStage.HELD:
            assert "`scontrol release JOB`" in state.sentence or "`rlhpc stop`" in state.sentence, state.name


# ------------------------------------------------------------------------------------------------------------- reasons


@pytest.mark.parametrize("reason", REASONS)
def test_a_reason_is_explained_in_words_of_its_own(reason: str) -> None:
    assert reason_in_words(reason) == REASONS[reason]
    assert " " in REASONS[reason]


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("QOSMaxJobsPerUserLimit", "this QOS has as many running jobs in use as it allows per user"),
        ("QOSMaxCpuPerUserLimit", "this QOS has as many cores in use as it allows per user"),
        ("AssocGrpCpuLimit", "this account has as many cores in use as it allows"),
        ("AssocGrpGRES", "this account has as many GPUs in use"),
        ("AssocGrpCPUMinutesLimit", "this account has used up its minutes of cores"),
        ("AssocGrpCPURunMinutesLimit", "this account has as many minutes of cores in use"),
        ("AssocMaxWallDurationPerJobLimit", "requests more time than this account allows per job"),
        ("QOSMaxWallDurationPerJobLimit", "allows per job; lower `time` in the site file, or another `qos`"),
        ("QOSMaxGRESPerUser", "if none of them runs, this one alone is beyond the limit: a smaller size"),
        ("QOSMaxGRESPerNode", "requests more GPUs than this QOS allows per node"),
        ("QOSMinGRES", "requests fewer GPUs than the minimum of this QOS"),
        ("MaxJobsPerAccount", "as many running jobs in use as it allows per account"),
        ("AssocMaxSubmitJobLimit", "as many submitted jobs"),
    ],
)
def test_a_limit_is_taken_apart_into_whose_it_is_and_of_what(reason: str, words: str) -> None:
    assert reason_in_words(reason).startswith(words) or words in reason_in_words(reason)


def test_what_slurm_adds_to_a_reason_is_kept() -> None:
    said = reason_in_words("(ReqNodeNotAvail, UnavailableNodes:g[0-1])")
    assert said.startswith(REASONS["ReqNodeNotAvail"])
    assert said.endswith("(UnavailableNodes:g[0-1])")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("launch failed requeued held", "scontrol release"),
        ("job requeued in held state", "scontrol release"),
        ("Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions", "drained"),
    ],
)
def test_texts_in_the_reasons_place_are_understood(text: str, words: str) -> None:
    assert words in reason_in_words(text)


def test_an_unknown_reason_is_shown_as_it_is() -> None:
    assert reason_in_words("MoonPhase") == "MoonPhase"
    assert reason_in_words("") == ""


def test_only_what_never_starts_by_itself_is_stuck() -> None:
    stuck = ("JobHeldUser", "DependencyNeverSatisfied", "job requeued in held state", "launch failed requeued held")
    assert all(is_stuck(reason) for reason in stuck)
    assert not any(is_stuck(reason) for reason in ("Resources", "Dependency", "BeginTime", "QOSGrpGRES", "None", ""))
    beyond = ("QOSMaxGRESPerJob", "QOSMaxWallDurationPerJobLimit", "AssocMaxNodePerJobLimit", "QOSMaxCpuPerNode")
    assert all(is_stuck(reason) for reason in (*beyond, "QOSMinGRES"))
    waits = ("QOSMaxGRESPerUser", "QOSMaxJobsPerUserLimit", "AssocGrpGRESMinutes", "AssocMaxJobsLimit")
    assert not any(is_stuck(reason) for reason in waits)
