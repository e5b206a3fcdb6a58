"""External servers: any server with OpenAI's chat completions API, used as a replica that answers with text."""
