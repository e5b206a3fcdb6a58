"""The nouns every room shares. Knows no tensor, socket, framework or policy; imports stdlib and msgspec only."""
