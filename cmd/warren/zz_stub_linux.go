package main

import "github.com/spf13/cobra"

func serveCommand(a *app) *cobra.Command { return &cobra.Command{Use: "serve"} }
func benchCommand(a *app) *cobra.Command { return &cobra.Command{Use: "bench"} }
