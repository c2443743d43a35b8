import sys
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np

from rlhpc.buffer.segments import read_rollouts_directory
from rlhpc.data.tokenizer import PromptTokenizer

# %% [markdown]
# # What a run has sampled
#
# Every rollout that a run has trained on or dropped stands in `RUN_DIR/rollouts/segment_*.h5` (rlhpc/buffer/README.md).
# This is a plain program, `python examples/read_segments.py runs/tutorial tutorial/model`, and its `# %%` marks make it
# a notebook in editors that know them (VS Code, Spyder, PyCharm).

# %%


run_dir, model_dir = map(Path, sys.argv[1:3])
groups = list(read_rollouts_directory(run_dir / "rollouts"))  # verifies every checksum
tokenizer = PromptTokenizer(model_dir)

# %% [markdown]
# ## Trained or dropped
#
# A group is one prompt with its completions. It was trained on in one optimiser step, or dropped for a reason:
# `zero_variance` are groups whose members all got the same reward, so that no advantage tells them apart.

# %%
trained = [group for group in groups if group.consumed_step >= 0]
reasons = Counter(str(group.drop_reason) for group in groups if group.consumed_step < 0)
print(f"{len(groups)} groups, {len(trained)} trained, dropped: {dict(reasons)}")

# %% [markdown]
# ## Reward over policy versions
#
# By the version that was live when a group was admitted, and of all groups: the batches alone would show a lower reward
# than the policy has, since groups that are all right are dropped from them.

# %%
rewards = defaultdict(list)
for group in groups:
    rewards[group.group.admitted_version] += [member.reward for member in group.group.members]
versions = sorted(rewards)
for part in np.array_split(versions, min(6, len(versions))):
    mean = np.mean([reward for version in part for reward in rewards[version]])
    print(f"versions {part[0]:3} to {part[-1]:3}: mean reward {mean:.3f}")

# %% [markdown]
# ## Staleness
#
# A rollout is as stale as the number of versions between its admission and the step that trained it. Tokens are
# fresher than that, since engines take new weights while they sample: `versions` has the version of each token.

# %%
staleness = Counter(group.trained_version - group.group.admitted_version for group in trained)
rollouts = [member.rollout for group in trained for member in group.group.members]
spanning = sum(rollout.versions[0] != rollout.versions[-1] for rollout in rollouts)
print("groups by staleness:", dict(sorted(staleness.items())))
print(f"{spanning} of {len(rollouts)} trained rollouts were sampled by more than one version")

# %% [markdown]
# ## The least likely token of a wrong answer
#
# Every token has the log-probability with which it was sampled.

# %%
prompt, last_wrong = [
    (group.group.prompt, member) for group in groups for member in group.group.members if member.verdict == "wrong"
][-1]
rollout = last_wrong.rollout
unlikely = int(np.argmin(rollout.behaviour_logprobs))
print(tokenizer.decode(prompt.token_ids) + tokenizer.decode(rollout.token_ids))
print(
    f"reference {prompt.reference!r}, reward {last_wrong.reward:.2f}; least likely token: "
    f"{tokenizer.decode(rollout.token_ids[unlikely : unlikely + 1])!r} "
    f"with probability {np.exp(rollout.behaviour_logprobs[unlikely]):.3f}"
)
