"""Files that workspaces keep: metadata in the database, bytes in the data folder."""
