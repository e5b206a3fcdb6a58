"""Text and tokens: chat templates, tokenizing, detokenizing, cache marks and grammars of one model."""
