"""How a call is split over ranks and how its results are joined.

- `modes`: the registries `Dispatch` and `Execute`, and the record that `@register` attaches.
- `padding`: fill a batch up so that it divides, and remove the added rows from the results.
- `unsplit`: refuse calls in which every rank would receive all rows of a batch.
- `batch_modes`: split and join batches by rank or by the data-parallel ranks of a mesh.
- `megatron_modes`: split by a tp × cp × dp × pp layout of the ranks.
- `builtin_modes`: the table of the modes that come with the package.
- `register`: the decorator `@register`.

May import `quadriga.errors`, `quadriga.protocol`, `single_controller.call` and
`single_controller.placement`. Each module imports only modules above it in this list.
"""
