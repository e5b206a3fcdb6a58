# Anthropic's Claude Code: one task, with the shell, over the Messages API.
set -u
source "$SCRIPTS/agent_checks.sh"
mkdir -p task && cd task
export ANTHROPIC_BASE_URL=$BASE_URL ANTHROPIC_MODEL=$MODEL ANTHROPIC_DEFAULT_HAIKU_MODEL=$MODEL
export CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1 CLAUDE_CODE_MAX_RETRIES=0 IS_SANDBOX=1
agent() { ANTHROPIC_AUTH_TOKEN=$1 timeout 100 claude -p "$2" --dangerously-skip-permissions </dev/null; }
agent_checks
