"""What a gateway process counts, and how the pages of several processes become one."""
