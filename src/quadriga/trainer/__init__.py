"""The trainers and the commands built on them. The algorithm is `ppo.RayPPOTrainer.fit`.

    ppo.py            `RayPPOTrainer`: PPO and related algorithms; `fit` reads like the algorithm
    stages.py         what each step of the loop does on the controller, from prompts to advantages,
                      and the runner of stages
    dataflow.py       which fields each stage reads and writes, the check of their order, and the
                      order of the rows
    validation.py     scores on validation data
    ingredients.py    tokenizer, prompts and reward function
    preflight.py      calls all checks before a process starts
    memory.py         the memory of a run, known before a process starts
    worker_groups.py  starts, stops and saves the worker groups of a run
    streaming.py      the batches of a run whose generation goes on while the policy is trained
    checkpoints.py    what a checkpoint holds, when it is saved, and resuming
    record.py         metrics, samples and times in the run folder
    main.py           `quadriga train`
    fine_tuning.py    `quadriga sft` and `quadriga rm`: one worker group, updated batch by batch
    evaluation.py     `quadriga generate` and `quadriga eval`

    roles/            the roles of a run: built-in and added by users, their workers and pools
    checks/           checks of settings and data

The modules here import `roles` and `checks`. This package may import every package of Quadriga
except `compat`, `cli` and `testing`.
"""
