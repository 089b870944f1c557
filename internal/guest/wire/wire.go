// Package wire holds the messages of the guest's services and their form on the wire: the JSON form of the
// Connect protocol, written by hand. The guest must stay small, and the generated types with their runtime would
// cost more than all the rest of it; a test holds these messages against the generated ones.
//
// A message is a struct whose fields carry their JSON name in the tag "json" and, for members of a oneof, its name
// in the tag "oneof". Such members are pointers or bytes, of which at most one is not nil.
package wire
