"""From a request to a stream of text: validation, templates, tokenizing, stop strings, output streams, metrics.

Knows engines only as `cluster.replica.EngineClient`, and no HTTP framework, tensor or model file.
"""
