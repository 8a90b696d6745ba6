"""The memory of a run, known before a process starts.

- `plan`: one table of phase × what is held × bytes, for each command.
- `check`: the printed table, the refusal of a run that does not fit, and what to change.
- `machine`: the memory that ranks can use, of a device or of a machine.
"""
