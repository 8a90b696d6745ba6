"""What surrounds the training loop: what a run needs before it, starts for it, and writes from it.

    preflight.py        checks of settings, files and folders before any process starts
    ingredients.py      tokenizer, prompts and reward function
    checks/             lengths, token ids and images of the data against the model
    role_workers.py     which roles share processes, and the class of each process
    pools.py            the pools of a program, in place of the section `placement`
    groups.py           the worker groups of a run, started and stopped together
    resuming.py         the controller's part of a checkpoint
    stopping.py         what a signal does to a run
    record.py           metrics, samples and times that a run writes

This package may import `trainer.placement`, `trainer.dataflow` and `trainer.stages`, and every
package below `trainer`. It must not import the trainers.
"""
