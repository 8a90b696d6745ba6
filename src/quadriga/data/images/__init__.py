"""Images in prompts.

- `reading`: the images of a row, as bytes or files → images of Pillow; what cannot be read is
  refused.
- `prompts`: `<image>` in the text of a prompt → image tokens, patches and positions.
- `positions`: the position of each token in time, height and width.
"""
