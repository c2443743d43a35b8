"""[[service]] and [reward_model]: models beside the policy, which teach it, reward it or judge it.

A service with a `path` is started with the run, by `rlhpc run` on this machine and by `rlhpc submit` on nodes of its
own; one with a `url` runs already, and several runs may share it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from rlhpc.config.setting import (
    ANY_SIZE,
    BYTES,
    PROCESSES,
    SECONDS,
    USUAL_TOKENS,
    Duration,
    Faults,
    Keys,
    LoosePath,
    NamedPath,
    Positive,
    Section,
    Usual,
    only_with,
    rule,
)
from rlhpc.config.tables_services import Name

if TYPE_CHECKING:
    from rlhpc.config.rules import Config

ServiceKind = Literal["teacher", "reward", "judge"]
STARTED = only_with("service.url", "", why="others run it")
REMOTE = only_with("service.path", None, why="its address and its key are the run's own")


class ServiceConfig(Section):
    """[[service]]: a model beside the policy."""

    name: Name
    """Its name, by which data.teacher, judge.service and reward_model.service refer to it."""
    kind: ServiceKind
    """Its purpose: log-probabilities of the policy's tokens ("teacher"), scores of a reward model ("reward"),
    or replies of a chat model ("judge")."""
    path: LoosePath | None = None
    """HF checkpoint of a model that is started with the run."""
    url: str = ""
    """Instead: base URL of a server that runs already, such as "http://node7:8000/v1"; teachers need one that returns
    prompt_logprobs, as vLLM does."""
    model: Annotated[str, REMOTE] = ""
    """Name of the model at the url; default: the first that it lists."""
    key_variable: Annotated[str, REMOTE] = ""
    """Environment variable that holds the API key of the url; default: no key is sent."""
    key_file: Annotated[NamedPath, REMOTE] = ""
    """Instead: a file that holds it, readable only by its owner.  Never put keys in run files."""
    replicas: Annotated[Positive, Usual(1, 1024, PROCESSES), STARTED] = 1
    """Processes that share its requests, each with a copy of the model."""
    tensor_parallel: Annotated[Positive, Usual(1, 64, "it is in GPUs"), STARTED] = 1
    """GPUs of a replica."""
    dtype: Annotated[Literal["float32", "bfloat16", "float16"] | None, STARTED] = None
    """Type of its weights; none: model.dtype."""
    max_tokens: Annotated[Positive | None, USUAL_TOKENS, STARTED] = None
    """Tokens of a request and its reply, at most; none: for a teacher those of the policy's longest rollout; for others
    twice as many and 4,096 more, for a judge also judge.max_tokens, or what the model has positions for."""
    max_num_seqs: Annotated[Positive, Usual(1, 4096, "it is in sequences"), STARTED] = 64
    """Requests that a replica computes at once; further ones wait."""
    kv_cache_bytes: Annotated[Positive | None, Usual(1e6, 1e13, BYTES), STARTED] = None
    """Memory of a replica's KV cache; none: what vLLM finds free on its GPU, and 256 MiB on a CPU."""
    timeout_s: Annotated[Duration, Usual(1, 86400, SECONDS)] = 600.0
    """Patience of a request with the service, restarts and retries included; then its rollout's verdict is
    verifier_error."""

    @property
    def identity(self) -> str:
        """Name of its model by what determines its replies, and not by an address of a run."""
        return f"{self.url} {self.model}".strip() if self.path is None else str(self.path.absolute())

    @rule
    def there_is_one_of_both(self, config: Config, key: Keys) -> Faults:
        """`path` of a checkpoint, or `url` of a server: one of both."""
        if (self.path is None) == (not self.url):
            given = "neither" if self.path is None else "both"
            yield f"{key.path} and {key.url}: {given} given; legal: one of both"
        if self.url and not self.url.startswith(("http://", "https://")):
            yield f"{key.url}: legal: an address that begins with http:// or https://"
        if self.key_variable and self.key_file:
            yield f"{key.key_variable} and {key.key_file}: both given; legal: one of both"

    @rule
    def a_teacher_has_room_for_every_rollout(self, config: Config, key: Keys) -> Faults:
        """`max_tokens` of a teacher: at least `generation.max_prompt_tokens` + `generation.max_completion_tokens`."""
        longest = config.generation.max_tokens
        if self.kind == "teacher" and self.max_tokens is not None and self.max_tokens < longest:
            yield f"{key.max_tokens} is below the longest rollout of {longest} tokens; legal: {longest} or more"

    @rule
    def names_differ(self, config: Config, key: Keys) -> Faults:
        """`name`: no other service has it."""
        if sum(each.name == self.name for each in config.service) > 1:
            yield f"{key.name}: two services have this name; legal: names that differ"


class RewardModelConfig(Section):
    """[reward_model]: how the task reward_model turns scores of a service into rewards."""

    whole_table = (only_with("data.task", "reward_model"),)

    service: str = ""
    """Name of the [[service]] of kind "reward" that is asked; default: the only one."""
    prompt_template: str = "{prompt}"
    """Prompt that the completion answers, filled with the fields of the record: data.reference_field = "*"; a literal
    brace is doubled."""
    use_chat_template: bool = True
    """Prompt and completion are a user's and an assistant's message in the model's own chat template; false: one text,
    the completion behind the prompt."""
    label: Annotated[str, ANY_SIZE] = ""
    """Name or number of the class whose score counts, of a model with several; default: its only one.  A number where
    the service has a url."""
    step_separator: str = ""
    """Text that ends each step of a completion, such as "\\n\\n", for a process reward model; what a step adds to the
    reward, or takes from it, is earned at its last character."""
    step_token: str = ""
    """Token at which a process reward model scores a step, put in place of step_separator."""
    step_reduction: Annotated[Literal["mean", "min", "last", "product"], only_with("reward_model.step_separator")] = (
        "min"
    )
    """How scores of steps become the reward of the completion."""
    activation: Literal["none", "sigmoid", "softmax"] = "none"
    """Function of the score, or of those of all classes, applied before scale and shift."""
    scale: Annotated[float, Usual(-1000, 1000, "it multiplies a score", zero=True)] = 1.0
    """Factor of a score."""
    shift: Annotated[float, Usual(-1000, 1000, "it is added to a score", zero=True)] = 0.0
    """Added to a scaled score."""
    clip_low: Annotated[float | Literal["off"], ANY_SIZE] = "off"
    """Lowest reward."""
    clip_high: Annotated[float | Literal["off"], ANY_SIZE] = "off"
    """Highest reward."""
    correct_from: Annotated[float, ANY_SIZE] = 0.0
    """Minimum reward of a completion that counts as correct."""

    @rule
    def a_class_is_chosen(self, config: Config, key: Keys) -> Faults:
        """`label`: a number if the service has a `url`; `activation` = `"softmax"` is over several classes, so that one
        of them must be chosen.
        """
        service = config.service_asked_by("reward_model")
        if self.label and not self.label.isdecimal() and service is not None and service.url:
            yield f"{key.label} with service.url={service.url!r}; legal: its number, since names are not known there"
        if self.activation == "softmax" and not self.label:
            yield f"{key.activation} without {key}.label, which would be 1 for every completion; legal: both"

    @rule
    def the_range_is_one(self, config: Config, key: Keys) -> Faults:
        """`clip_low`: below `clip_high`; `step_token` goes with `step_separator`."""
        if self.clip_low != "off" and self.clip_high != "off" and self.clip_low >= self.clip_high:
            yield f"{key.clip_low} is not below {key.clip_high}"
        if bool(self.step_token) != bool(self.step_separator):
            yield f"{key.step_token} with {key.step_separator}; legal: both, or neither"
