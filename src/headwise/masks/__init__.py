"""Which query may attend to which key: small frozen objects that combine with & | ~.

Letters: B batch, H query heads, L queries, S keys; indices b h i j. True means "may attend", everywhere.
Query i has the position offset + i; the default offset S - L puts the last query at the last key.
A mask never holds an L x S array unless the user gave one: it answers for the indices it is asked about.

A kind of mask is a file: what it is made of, its checks, its rule, which keys its blocks see.
"""

from headwise.masks.dense_mask import Dense as Dense
from headwise.masks.dense_mask import dense as dense
from headwise.masks.documents_mask import Documents as Documents
from headwise.masks.documents_mask import documents as documents
from headwise.masks.function_mask import MaskMod as MaskMod
from headwise.masks.function_mask import mask_mod as mask_mod
from headwise.masks.joined import And as And
from headwise.masks.joined import Not as Not
from headwise.masks.joined import Or as Or
from headwise.masks.keys_mask import Keys as Keys
from headwise.masks.keys_mask import keys as keys
from headwise.masks.lengths_mask import Lengths as Lengths
from headwise.masks.lengths_mask import key_lengths as key_lengths
from headwise.masks.lengths_mask import prefix as prefix
from headwise.masks.mask import Mask as Mask
from headwise.masks.mask import as_mask as as_mask
from headwise.masks.mask import fold as fold
from headwise.masks.spans import Span as Span
from headwise.masks.spans import Spans as Spans
from headwise.masks.window_mask import Window as Window
from headwise.masks.window_mask import causal as causal
from headwise.masks.window_mask import window as window
