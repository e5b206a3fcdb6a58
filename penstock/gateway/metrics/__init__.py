"""The metrics of a gateway process, and the merge of the pages of several processes."""
