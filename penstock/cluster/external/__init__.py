"""Uses any server with OpenAI's chat completions API as a replica that answers with text."""
