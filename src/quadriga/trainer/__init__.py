"""The trainers and the commands built on them. The algorithm is `ppo.RayPPOTrainer.fit`.

    ppo.py            `RayPPOTrainer`: PPO and related algorithms; `fit` reads like the algorithm
    stages.py         what each step of the loop does on the controller
    stage_runner.py   runs the stages, and those of added roles before and after them
    sampling.py       from prompts to the batch of a step
    validation.py     scores on validation data
    dataflow.py       which fields each stage reads and writes, and the check of their order
    ingredients.py    tokenizer, prompts and reward function
    role_workers.py   the worker class and arguments of each role
    worker_groups.py  starts, stops and saves the worker groups of a run
    checkpoints.py    what a checkpoint holds, when it is saved, and resuming
    record.py         metrics, samples and times in the run folder
    main.py           `quadriga train`

    roles/            the roles of a run: built-in and added by users, their pools and start order
    checks/           checks before any process starts
    fine_tuning/      supervised fine-tuning, and reward models from pairs
    evaluation/       `quadriga generate` and `quadriga eval`

The modules here import `roles` and `checks`; `fine_tuning` and `evaluation` import the modules
here. This package may import every package of Quadriga except `compat`, `cli` and `testing`.
"""
