# Nothing by name: later versions have a function here that earlier ones lack.
