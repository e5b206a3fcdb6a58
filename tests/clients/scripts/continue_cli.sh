# Continue: one task, with the shell, over chat completions.
set -u
source "$SCRIPTS/agent_checks.sh"
mkdir -p task && cd task
agent() {
  cat >config.yaml <<YAML
name: penstock
version: 0.0.1
schema: v1
models:
  - {name: penstock, provider: openai, model: $MODEL, apiBase: $BASE_URL/v1, apiKey: $1, capabilities: [tool_use]}
YAML
  timeout 100 cn --config config.yaml --auto -p "$2" </dev/null
}
agent_checks
