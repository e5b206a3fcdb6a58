# Qwen Code: one task, with the shell, over chat completions.
set -u
source "$SCRIPTS/agent_checks.sh"
mkdir -p task && cd task
agent() {
  OPENAI_API_KEY=$1 OPENAI_BASE_URL=$BASE_URL/v1 OPENAI_MODEL=$MODEL \
    timeout 100 qwen -y --auth-type openai -p "$2" </dev/null
}
agent_checks
