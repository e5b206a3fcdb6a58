"""From the text that a model writes to reasoning, words and tool calls, and from tools to what a model reads.

Each family of models has its own way to write a call; `formats` lists them. Knows no wire format and no engine.
"""
