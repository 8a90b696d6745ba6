"""Models of text and images.

- `processor`: the tokens that stand for images, and the image processor of a folder.
- `rows`: the images of the rows of a batch, with the positions of their tokens.
- `tiny`: write a small model of text and images.
"""
