"""Several ranks that compute the same rows together, each a part.

checks         which models can be split over how many ranks
tensor_layers  decoder layers with divided weights
tensor_plan    which dimension of each weight is divided
token_slice    the tokens and the targets of one rank
"""
