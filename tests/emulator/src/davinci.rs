//! `/dev/davinci_manager`: the multiplexer that binds a file to a module and releases files.
