"""Measures servers and engines: workloads, a load generator, reports and plots.

Talks to servers only over HTTP, as any client would, and to an offline engine only through a function it is
given. Knows no engine, no gateway and no web framework, and draws nothing but its own tables and plots.
"""
