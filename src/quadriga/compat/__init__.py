"""Import names of other libraries, so that code written for them runs on Quadriga.

`verl`: the public names of verl 0.9.1. This package may import every package of Quadriga except
`cli` and `testing`. No package imports it.
"""
