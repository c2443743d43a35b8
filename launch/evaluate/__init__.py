"""Evaluations of models: by a command, beside a run, as a job.

request.py      what is asked for: a model (Target) and a dataset (Request), by words or by [[evaluation]]
evaluation.py   one evaluation on this machine: checked, drawn by processes of rlhpc/roles/evaluator.py, reported
follow.py       one after the other while a run trains: the program of the role `evaluator`
job.py          either as a Slurm job
command.py      `rlhpc evaluate` and `rlhpc compare`
"""
