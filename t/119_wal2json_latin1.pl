# The format wal2json in a database that is not UTF8, compared with wal2json itself: names, values,
# messages and lists of them, byte for byte, through the SQL functions and through the replication
# protocol.

use strict;
use warnings;

use FindBin;
use lib "$FindBin::RealBin/lib";
use Braid;
use Encode ();
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $libraries = `pg_config --pkglibdir`;
chomp $libraries;
plan skip_all => "wal2json is not installed in $libraries" unless -e "$libraries/wal2json.so";

# This file is UTF-8; sent and received text is LATIN1.
sub latin1 { my ($text) = @_; Encode::from_to($text, 'UTF-8', 'ISO-8859-1'); return $text; }
$ENV{PGCLIENTENCODING} = 'LATIN1';
my $conf = "max_replication_slots = 10\nmax_wal_senders = 10\nautovacuum = off\n";
$conf .= "output_plugin_libraries = 'braid, wal2json'\n" if slurp_file($ENV{BRAID_NODE_CONF}) =~ /output_plugin_libraries/;
my $node = new_server('node', init => [ '--encoding=LATIN1', '--locale=C' ], conf => $conf);
is($node->safe_psql('postgres', 'show server_encoding'), 'LATIN1', 'a database in LATIN1');

$node->safe_psql('postgres', "select pg_create_logical_replication_slot('theirs', 'wal2json'), pg_create_logical_replication_slot('ours', 'braid')");
$node->safe_psql('postgres', latin1(<<'SQL'));
create schema "café";
create type moeurs as enum ('gai', 'fâché');
create table "café"."Größe" ("clé" int primary key, "année" text default 'été', m moeurs, n numeric);
create table plain (id int primary key, v text);
insert into "café"."Größe" values (1, 'née', 'fâché', 1.5), (2, 'naïve "ÿ"', 'gai', null);
update "café"."Größe" set "année" = E'deux\n\u00e9' where "clé" = 2;
update "café"."Größe" set "clé" = 3 where "clé" = 1;
delete from "café"."Größe" where "clé" = 2;
insert into plain values (1, 'à');
begin;
insert into plain values (2, 'ß'), (3, 'x');
select pg_logical_emit_message(true, 'é', 'contenu é');
select pg_logical_emit_message(true, 'ascii', 'contenu ç');
commit;
insert into plain values (4, 'y');
select pg_logical_emit_message(false, 'é', 'hors de tout é');
select pg_logical_emit_message(false, 'e', 'plain');
truncate "café"."Größe", plain;
SQL

# The output of a slot, and psql's messages.
sub peeked
{
	my ($slot, @options) = @_;
	my $list = join '', map { ", '" . latin1($_) . "'" } $slot eq 'ours' ? ('format', 'wal2json') : (), @options;
	my ($out, $err) = ('', '');
	$node->psql('postgres', "select lsn, xid, data from pg_logical_slot_peek_changes('$slot', null, null$list)", stdout => \$out, stderr => \$err, on_error_stop => 0);
	return $out . join "\n", grep { !/^(LOCATION|CONTEXT|HINT):/ } split /\n/, $err;
}

# The same through the replication protocol.
my $end;
sub received
{
	my ($slot, @options) = @_;
	my @arguments = $slot eq 'ours' ? ('-o', 'format=wal2json') : ();
	while (my ($name, $value) = splice @options, 0, 2) { push @arguments, '-o', latin1("$name=$value"); }
	$node->safe_psql('postgres', "select pg_copy_logical_replication_slot('$slot', 'copied')");
	my $file = "$PostgreSQL::Test::Utils::tmp_check/$slot.json";
	unlink $file;
	my ($out, $err) = ('', '');
	IPC::Run::run([ 'pg_recvlogical', '-d', $node->connstr('postgres'), '-S', 'copied', '--start', '--no-loop', '-E', $end, '-f', $file, @arguments ], '>', \$out, '2>', \$err, IPC::Run::timeout(60));
	$node->poll_query_until('postgres', "select not active from pg_replication_slots where slot_name = 'copied'");
	$node->safe_psql('postgres', "select pg_drop_replication_slot('copied')");
	return (-e $file ? slurp_file($file) : '') . join "\n", grep { !/^HINT:/ } split /\n/, $err;
}

$end = $node->safe_psql('postgres', 'select pg_current_wal_insert_lsn()');
$node->safe_psql('postgres', 'select pg_switch_wal()');

# With options that leave something in or out.
my @cases = (
	[ [], 'Größe', undef ],
	[ [ 'include-types' => 1, 'include-default' => 1, 'include-pk' => 1 ], 'été', undef ],
	[ [ 'pretty-print' => 1 ], 'fâché', undef ],
	[ [ 'filter-tables' => 'café.Größe' ], 'à', 'née' ],
	[ [ 'filter-tables' => '*.Größe, public.x' ], 'à', 'née' ],
	[ [ 'add-tables' => 'café.*' ], 'née', 'à' ],
	[ [ 'filter-msg-prefixes' => 'é' ], 'contenu ç', 'contenu é' ],
	[ [ 'add-msg-prefixes' => 'é' ], 'contenu é', 'contenu ç' ],
	[ [ 'add-msg-prefixes' => 'b, é', 'filter-msg-prefixes' => 'e' ], 'contenu é', 'contenu ç' ],
	[ [ 'add-msg-prefixes' => 'è' ], 'née', 'contenu' ],
);
my $compared = 0;
for my $case (@cases)
{
	my ($options, $has, $lacks) = @$case;
	for my $version (1, 2)
	{
		my @options = (@$options, 'format-version' => $version);
		for my $way ([ \&peeked, 'functions' ], [ \&received, 'pg_recvlogical' ])
		{
			my ($read, $name) = @$way;
			my ($theirs, $ours) = ($read->('theirs', @options), $read->('ours', @options));
			my $equal = $theirs eq $ours && index($ours, latin1($has)) >= 0 && (!defined $lacks || index($ours, latin1($lacks)) < 0);
			$compared += () = $ours =~ /\n/g;
			ok($equal, "$name: @options") or diag "wal2json:\n$theirs\n\nbraid:\n$ours\n";
		}
	}
}
cmp_ok($compared, '>', 200, "lines compared: $compared");

done_testing();
