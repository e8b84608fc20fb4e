"""What an attention call may say beside q, k and v: each option one file, all of them together `Options`."""

from headwise.options.options import Options as Options
