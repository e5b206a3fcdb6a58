"""OpenAI's dialect: completions, chat, responses, embeddings, files and batches."""
