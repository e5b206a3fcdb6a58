# Cline: one task, with the shell, over chat completions.
set -u
source "$SCRIPTS/agent_checks.sh"
mkdir -p task && cd task
agent() {
  timeout 60 cline auth -p openai-compatible -k "$1" -m "$MODEL" -b "$BASE_URL/v1" </dev/null >&2 || return 1
  timeout 100 cline -P openai-compatible -m "$MODEL" --retries 1 "$2" </dev/null
}
agent_checks
