"""The trainers and the commands built on them. The algorithm is `ppo.RayPPOTrainer.fit`.

    ppo.py            `RayPPOTrainer`: PPO and related algorithms; `fit` reads like the algorithm
    stages.py         what each step of the loop does on the controller, the order of the rows, and
                      the runner of stages
    dataflow.py       which fields each stage reads and writes, and the check of their order
    sampling.py       from prompts to the batch of a step
    validation.py     scores on validation data
    ingredients.py    tokenizer, prompts and reward function
    preflight.py      calls all checks before a process starts
    worker_groups.py  starts, stops and saves the worker groups of a run
    replicas.py       a rollout of worker groups that fail and start again one by one
    checkpoints.py    what a checkpoint holds, when it is saved, and resuming
    record.py         metrics, samples and times in the run folder
    main.py           `quadriga train`

    roles/            the roles of a run: built-in and added by users, their workers and pools
    checks/           checks of settings and data
    memory/           the memory of a run, known before a process starts
    fine_tuning/      supervised fine-tuning, and reward models from pairs
    evaluation/       `quadriga generate` and `quadriga eval`

The modules here import `roles` and `checks`; `fine_tuning` and `evaluation` import the modules
here. This package may import every package of Quadriga except `compat`, `cli` and `testing`.
"""
