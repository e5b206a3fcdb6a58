# curl with HTTP/1.1 and with an offer of HTTP/2, compressed bodies, streams and errors.
CHAT="$BASE_URL/v1/chat/completions"

body() { # model, stream, max_tokens
  printf '{"model": "%s", "stream": %s, "max_tokens": %s, "messages": [{"role": "user", "content": "Say hello."}]}' "$@"
}

ask() { curl -sS -m 120 -H "Authorization: Bearer $API_KEY" -H 'Content-Type: application/json' "$@"; }

report() { # capability, then a command that must succeed
  local name=$1; shift
  if "$@" >&2; then ok=true; else ok=false; fi
  printf '{"capability": "%s", "ok": %s, "note": ""}\n' "$name" "$ok"
}

chat() { ask "$@" "$CHAT" -d "$(body "$MODEL" false 8)" | grep '"chat.completion"'; }

compressed() {
  body "$MODEL" false 8 | gzip | ask -H 'Content-Encoding: gzip' "$CHAT" --data-binary @- | grep '"chat.completion"'
}

stream() { ask -N "$CHAT" -d "$(body "$MODEL" true 8)" | grep -F 'data: [DONE]'; }

errors() {
  [ "$(ask -o /dev/null -w '%{http_code}' "$CHAT" -d "$(body no-such-model false 8)")" = 404 ] &&
    [ "$(API_KEY=wrong ask -o /dev/null -w '%{http_code}' "$CHAT" -d "$(body "$MODEL" false 8)")" = 401 ] &&
    ask "$BASE_URL/chat/completions" -d "$(body "$MODEL" false 8)" | grep 'Did you mean /v1/chat/completions'
}

cancel() { ask -N "$CHAT" -d "$(body "$MODEL" true 2000)" 2>/dev/null | head -c 20 | grep '^data: ' && chat; }

curl --version | sed -n '1s/^curl \([^ ]*\).*/{"version": "\1"}/p'
report chat chat
report chat chat --http2
report chat compressed
report stream stream
report errors errors
report cancel cancel
