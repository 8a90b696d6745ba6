"""Log-probabilities, entropy and KL of tokens.

log_prob         from logits
linear_log_prob  from hidden states, without the logits of all tokens at once
linear_full_kl   KL over the vocabulary, in the same way
vocabulary_parallel  the same with a vocabulary that is split over ranks
softmax_tiles    the tiles of the vocabulary that both compute
"""
