"""The trainers and the commands built on them. The algorithm is `ppo.RayPPOTrainer.fit`.

The loop:

    ppo.py          `RayPPOTrainer`: PPO and related algorithms; `fit` reads like the algorithm
    fine_tuning/    supervised fine-tuning, and reward models from pairs
    stages.py       what each step of the loop does on the controller
    sampling.py     from prompts to the batch of a step
    validation.py   score on validation data
    dataflow.py     which fields each stage reads and writes, and the check of their order
    placement.py    `Role`, `ResourcePoolManager`: which role runs on which pool
    roles/          roles that users add: declaration, settings, place in a step, start order
    run/            what surrounds the loop: checks, loaders, worker groups, checkpoints, records

Commands: main.py (`quadriga train`), fine_tuning/, evaluation/, make_data.py, demo.py.

This package may import every package of Quadriga except `compat`, `cli` and `testing`.
"""
