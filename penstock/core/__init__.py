"""The types that all rooms share. Knows no tensor, socket, framework or policy; imports stdlib and msgspec only."""
