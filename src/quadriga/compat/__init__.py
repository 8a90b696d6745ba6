"""Names and settings of other libraries, so that code written for them runs on Quadriga.

`verl`: the public names of verl 0.9.1. `verl_settings`: its settings files and command
lines as settings of ours. May import every package except `cli` and `testing`.
"""
