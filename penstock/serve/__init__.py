"""The composition root: which objects a server process, a gateway process and a control plane are made of.

Reads the config file and the environment, builds the parts of the rooms below, connects them and takes them down in
order. Decides nothing about requests.
"""
