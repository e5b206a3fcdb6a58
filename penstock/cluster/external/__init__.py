"""Other people's engines: any server that speaks OpenAI's chat completions, as a replica that answers with text."""
